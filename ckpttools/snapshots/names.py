"""The names that training stacks give to snapshots, and the step in them. Pure.

Patterns match a whole name: `step-100.backup` is not step 100 with something behind it, it is somebody's copy. A pattern of
your own (`--pattern`) has a group `step`, or one group that is the step.
"""

from __future__ import annotations

import re

from ckpttools.errors import UsageError

FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".pth.tar", ".safetensors", ".bin", ".nemo")
_SUFFIX = r"(?:\.(?:ckpt|pt|pth|pth\.tar|safetensors|bin|nemo))?"
_VALUE = r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?"
_SCHEMES = (
    rf"(?:global[-_]?)?steps?[-_=]?(?P<step>\d+)(?:[-_]ckpt?)?{_SUFFIX}",  # torchtitan, fms-fsdp, DeepSpeed, verl, accelerate
    r"global_step(?P<step>\d+)_universal",  # DeepSpeed's ds_to_universal
    rf"iter(?:ation)?s?[-_=]?(?P<step>\d+)(?:[-_]ckpt?)?{_SUFFIX}",  # Megatron, mmengine, lit-gpt
    rf"(?:checkpoint|ckpt)s?(?:[-_](?:global[-_]?)?(?:step|iter(?:ation)?))?[-_=]?(?P<step>\d+){_SUFFIX}",  # HF Trainer, flax
    rf"tag[-_]?(?P<step>\d+){_SUFFIX}",
    r"model[-_](?:(?:step|iter)[-_]?)?(?P<step>\d+)\.(?:ckpt|pt|pth|safetensors|bin)",  # detectron2
    rf"epoch[-_](?P<step>\d+){_SUFFIX}",  # mmengine, accelerate
    rf"epoch[-_]?\d+[-_](?:global[-_]?)?step[-_=]?(?P<step>\d+){_SUFFIX}",  # NeMo Automodel, OpenDiT
    rf"ep\d+-ba(?P<step>\d+)(?:-rank0)?{_SUFFIX}",  # Composer: a directory of shards, or the one file of rank 0
    rf"checkpoint_\d+_(?P<step>\d+){_SUFFIX}",  # fairseq: epoch and update
    r"step(?P<step>\d+)-unsharded",  # OLMo
    rf"0*(?P<step>\d+){_SUFFIX}",
    # Lightning and NeMo: a prefix, then name=value pairs joined by dashes; the step where there is one, else the epoch
    rf"(?:[\w.]+-{{1,2}})?(?:[\w./]+={_VALUE}-)*?step=(?P<step>\d+)(?:\.\d+)?(?:-[\w./]+={_VALUE})*(?:-last)?(?:-v\d+)?{_SUFFIX}",
    rf"(?:[\w.]+-{{1,2}})?(?:[\w./]+={_VALUE}-)*?epoch=(?P<step>\d+)(?:-[\w./]+={_VALUE})*(?:-last)?(?:-v\d+)?{_SUFFIX}",
    r"iter_(?P<step>\d+)_\d+_local\.pt",  # nvidia-resiliency-ext
)
_PATTERNS = tuple(re.compile(s, re.IGNORECASE) for s in _SCHEMES)
_LOOKS_LIKE_ONE = re.compile(r"(?:step|iter|checkpoint|ckpt|epoch)[-_=]?\d|^\d+[-_.]", re.IGNORECASE)
_METRIC = re.compile(rf"([A-Za-z_][\w./]*)=({_VALUE})(?=[-_.]|$)", re.IGNORECASE)
_MARKS = (
    re.compile(r"(?P<base>.+?)-unfinished"),  # NeMo
    re.compile(r"(?P<base>.+?)__\d+__unfinished"),  # ML Flashpoint
)
_TEMPORARY = (
    re.compile(r"(?P<base>.+?)\.(?:tmp|incomplete|part|partial)"),
    re.compile(r"(?P<base>.+?)\.orbax-checkpoint-tmp-\d+"),
    re.compile(r"(?P<base>.+?\.)dirty\.(?P<suffix>pt)"),  # nvidia-resiliency-ext
    re.compile(r"tmp-(?P<base>.+)"),  # HF Trainer up to 4.39
    re.compile(r".+-s(?P<step>\d+)-n\d+-w\d+\.restore"),  # GKE's replicator, which renames it to `step=<N>`
)


def parse_pattern(text: str) -> re.Pattern[str]:
    """A pattern for names from `--pattern`. Raises UsageError: when it is no regular expression with a group for the step."""
    try:
        pattern = re.compile(text)
    except re.error as e:
        raise UsageError(f"not a regular expression: `{text}`", found=str(e)) from e
    if "step" not in pattern.groupindex and pattern.groups != 1:
        raise UsageError(f"a pattern needs a group for the step: `{text}`", hints=["write it like `model_at_(\\d+)`"])
    return pattern


def parse_step(name: str, pattern: re.Pattern[str] | None = None) -> int | None:
    """The step in a snapshot's name; None when it is no such name. Pure."""
    for candidate in (pattern,) if pattern is not None else _PATTERNS:
        match = candidate.fullmatch(name)
        if match:
            digits = match["step"] if "step" in candidate.groupindex else match[1]
            return int(digits) if digits and digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    return None


def next_rank(name: str) -> str:
    """The name of rank 1's file where a name is that of rank 0 (`ep0-ba100-rank0.pt`); empty for other names. Pure."""
    return re.sub(r"-rank0(?=\.|$)", "-rank1", name) if re.search(r"-rank0(?=\.|$)", name) else ""


def is_number(name: str) -> bool:
    """Whether a name is a number and nothing else, which says least about what it names. Pure."""
    return name.isascii() and name.isdigit()


def parse_mark(name: str) -> str | None:
    """The name of the snapshot whose save is marked as not finished by a file or directory of this name. Pure."""
    for mark in (*_MARKS, *_TEMPORARY):
        match = mark.fullmatch(name)
        if match and "step" in mark.groupindex:
            return f"step={match['step']}"
        if match:
            return match["base"] + (match["suffix"] if "suffix" in mark.groupindex else "")
    return None


def is_temporary(name: str) -> bool:
    """Whether a name is one that data has until its save is done, and then is renamed. Pure."""
    return any(mark.fullmatch(name) for mark in _TEMPORARY)


def looks_like_snapshot(name: str) -> bool:
    """Whether a name that is not known has a step in it, so that people should hear that it was left alone. Pure."""
    return bool(_LOOKS_LIKE_ONE.search(name))


def parse_metrics(name: str) -> dict[str, float]:
    """The metrics in a file's name: `epoch=1-step=100-val_loss=0.25.ckpt` has epoch, step and val_loss. Pure."""
    stem = name
    for suffix in FILE_SUFFIXES:
        stem = stem.removesuffix(suffix)
    return {key.rpartition("--")[2]: float(value) for key, value in _METRIC.findall(stem)}


def render_name(name: str) -> str:
    """A name for one line of text: a line break in it must not look like another row. Pure."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)
