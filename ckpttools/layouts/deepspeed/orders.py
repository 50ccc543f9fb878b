"""The order of the parameters in the optimizer's groups, over all ranks; and what of a pipeline its files do not name.

`optimizer.param_names` lists the parameters of each group in the order of the model, those of all stages one after the other,
experts by their global numbers. `extra_state.pipeline` has the number of each layer with what its names begin with, and the names
on each stage. With them what went over to another layout can come back. Read `add_orders` first.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.layouts.deepspeed.book import Book
from ckpttools.layouts.deepspeed.experts import all_experts, expert_counts, is_expert
from ckpttools.layouts.deepspeed.flat import DEFAULT_SUB_GROUP, join_sub_groups, undo_round_robin
from ckpttools.layouts.deepspeed.ranks import ModelFile, OptimizerFile, Ranks
from ckpttools.layouts.deepspeed.states import count, items, members, table
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER
from ckpttools.pickles.views import kind_of

TIED = "tied_modules."
"""What names of modules begin with that a pipeline has on several stages."""
PARAM_NAMES = (OPTIMIZER, "param_names")
PIPELINE = (EXTRA_STATE, "pipeline")
Groups = list[list[str]]


def add_orders(book: Book, ranks: Ranks, groups: int) -> None:
    """Add the objects that tell it. Left out where a file does not say it, or sub-groups do not tell where a group ends.

    Args: groups: of the optimizer, by its settings.
    """
    stages = [book.orders.get(pp) or _groups_of(ranks, pp, groups) for pp in range(ranks.pp)]
    if any(len(stage) != groups for stage in stages) or not groups:
        stages = []
    if stages:
        _add(book, PARAM_NAMES, join_stages(stages))
    if book.layers or ranks.pp > 1:
        names = [[name for group in stage for name in group] for stage in stages]
        _add(book, PIPELINE, {"layers": dict(sorted(book.layers.items())), "stages": names})


def join_stages(stages: Sequence[Groups]) -> Groups:
    """The groups over all stages: tied modules first, as each stage has them, and each once. Pure."""
    joined = []
    for g in range(len(stages[0])):
        names = dict.fromkeys(name for stage in stages for name in stage[g])
        joined.append(sorted(names, key=lambda name: not name.startswith(TIED)))
    return joined


def _groups_of(ranks: Ranks, pp: int, groups: int) -> Groups:
    """Of one stage, from the shapes of its flat vectors; none where they do not tell."""
    model = ranks.model_of(pp * ranks.tp)
    if model is None or not model.shapes:
        return []
    zero = table(members(model.top.get("ds_config")).get("zero_optimization"))
    optimizers = ranks.optimizers_of(pp * ranks.tp)
    first = next(iter(optimizers.values()), None)
    parts = first.partitions if first else []
    if ranks.stage == 3:
        stated = next((_positions(f) for f in optimizers.values()), [])
        return _placed(model, stated) or _joined(model, zero.get("sub_group_size"), ranks.dp, groups)
    found = []
    numbers = expert_counts(name for group in model.shapes for name in group)
    for g, shapes in enumerate(model.shapes):
        at = first.place(g) if first else g
        size = parts[at] if at < len(parts) and parts[at] else ranks.dp
        names = list(shapes)
        if ranks.stage == 2 and zero.get("round_robin_gradients") is True and optimizers:
            names = undo_round_robin(names, size)
        if any(map(is_expert, names)):
            if not optimizers:
                return []
            names = all_experts(names, max(1, ranks.dp // size), numbers)
        found.append(names)
    return found


def _positions(file: OptimizerFile) -> list[list[int]]:
    """The flat vectors of each group, as the inner optimizer numbers them."""
    stated = items(table(file.top.get("optimizer_state_dict")).get("param_groups"))
    return [[n for n in items(table(group).get("params")) if type(n) is int] for group in stated]


def _placed(model: ModelFile, positions: Sequence[Sequence[int]]) -> Groups:
    """The parameters of each group by the sub-groups that are its vectors; none where these are not all of them."""
    shapes = model.shapes or []
    if sorted(n for own in positions for n in own) != list(range(len(shapes))):
        return []
    return [[name for n in own for name in shapes[n]] for own in positions]


def _joined(model: ModelFile, most: object, dp: int, groups: int) -> Groups:
    names = [list(shapes) for shapes in model.shapes or []]
    return names if len(names) == groups else join_sub_groups(model.shapes or [], count(most) or DEFAULT_SUB_GROUP, dp)


def _add(book: Book, path: tuple[str, str], record: object) -> None:
    book.add_object(path, kind_of(record), record, path[0])
