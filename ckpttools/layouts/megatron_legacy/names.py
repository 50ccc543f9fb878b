"""Which model-parallel rank a file is of, told by its directory: `mp_rank_TT`, `mp_rank_TT_PPP`, `mp_rank_TT_PPP_EEE`.

The pipeline part is there only with more than one stage, the expert part only with more than one expert rank, so two
parts mean tensor and pipeline or tensor and expert rank; the arguments in the files tell which.

Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py (get_checkpoint_name, get_distributed_optimizer_checkpoint_name),
core_v0.16; megatron/checkpointing.py (get_checkpoint_names), v3.0, for `model_rng.pt` and `optim.pt`;
intelligent-machine-learning/dlrover, dlrover/trainer/torch/flash_checkpoint/megatron_dist_ckpt.py, for `rank_<RRRRR>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from ckpttools.model import Mesh

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""What holds a rank's share of the model; the second one where the optimizer has files of its own."""
BUFFER_FILE = "distrib_optim.pt"
"""The distributed optimizer's flat buffers of a model-parallel rank, gathered over the data-parallel ranks."""
SHARD_FILE = "optim.pt"
"""The optimizer of one data-parallel rank, in a directory with that rank's number at the end (2022)."""

_FILE = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,5}))?(?:_(\d{3,5}))?/(model_optim_rng|model_rng|distrib_optim|optim)\.pt")
_DLROVER_FILE = re.compile(r"rank_(\d{5})/distrib_optim\.pt")


@dataclass(frozen=True, slots=True)
class RankPath:
    """A file of a rank, and the numbers in the name of its directory."""

    path: str
    numbers: tuple[int, ...]

    @property
    def directory(self) -> str:
        """`mp_rank_01_000`."""
        return self.path.partition("/")[0]

    @property
    def file_name(self) -> str:
        """`model_optim_rng.pt`."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A model-parallel rank by its coordinates, ordered as layers and experts are numbered."""

    pp: int
    ep: int
    tp: int

    def rank(self, mesh: Parallel) -> int:
        """Its number among all model-parallel ranks: tensor-parallel ranks next to each other, stages far apart."""
        return self.tp + mesh.tp * (self.ep + mesh.ep * self.pp)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many ranks of each kind a checkpoint was saved from."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    """Model chunks (virtual stages) per pipeline stage."""
    etp: int = 1
    """Tensor-parallel ranks of the experts; as `tp` unless the arguments say otherwise."""

    def places(self) -> list[Place]:
        """Every rank, in order."""
        return [Place(*numbers) for numbers in product(range(self.pp), range(self.ep), range(self.tp))]

    def directory(self, place: Place) -> str:
        """The directory that the rank at `place` writes."""
        stage = f"_{place.pp:03d}" if self.pp > 1 else ""
        expert = f"_{place.ep:03d}" if self.ep > 1 else ""
        return f"mp_rank_{place.tp:02d}{stage}{expert}"

    def place(self, path: RankPath) -> Place | None:
        """The rank that wrote a file; None where the numbers in its name are not those of a rank of this mesh."""
        numbers = list(path.numbers[1:])
        stage = numbers.pop(0) if self.pp > 1 and numbers else 0
        expert = numbers.pop(0) if self.ep > 1 and numbers else 0
        place = Place(stage, expert, path.numbers[0])
        is_known = not any(numbers) and place.tp < self.tp and stage < self.pp and expert < self.ep
        return place if is_known else None

    def mesh(self) -> Mesh:
        """For people and JSON: axes of one rank are left out, but for `tp`."""
        optional = (("pp", self.pp), ("vpp", self.vpp), ("ep", self.ep), *((("etp", self.etp),) if self.etp != self.tp else ()))
        return Mesh((("tp", self.tp), *((axis, size) for axis, size in optional if size > 1 or axis == "etp")))


def parse_path(path: str) -> RankPath | None:
    """A file of this layout; None for any other. Pure."""
    match = _FILE.fullmatch(path) or _DLROVER_FILE.fullmatch(path)
    return RankPath(path, tuple(int(n) for n in match.groups()[:3] if n is not None)) if match else None


def is_shard(path: RankPath) -> bool:
    """Whether a file is the optimizer of one data-parallel rank, whose number is the last in its name."""
    return path.file_name == SHARD_FILE or not path.directory.startswith("mp_")
