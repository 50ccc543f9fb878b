"""What can be wrong with a checkpoint: one row per code, and the value that a check returns.

Codes are stable, texts may change. A code whose row says `incompleteness` means that the save did not finish or that
a part is absent (exit 3); every other error is damage or a difference (exit 1); warnings and notes exit 0.
`docs/reference/findings.md` is generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of finding."""

    code: str
    severity: str
    """`error`, `warning` or `note`, unless the place that emits it says otherwise."""
    meaning: str
    remedy: str
    is_incompleteness: bool = False


_GOOD_COPY = "restore the file from a good copy, or go back to an older snapshot"

TABLE: tuple[Code, ...] = (
    # the commit record and the files
    Code(
        "not-committed",
        ERROR,
        "the save did not finish: the file that is written last is absent",
        "use an older snapshot, or wait if the save is still running",
        True,
    ),
    Code(
        "unfinished-save",
        ERROR,
        "a mark of a save in progress (or one that died) is there",
        "use an older snapshot, or wait if the save is still running",
        True,
    ),
    Code("missing-file", ERROR, "a manifest names a file that is not there", _GOOD_COPY, True),
    Code(
        "missing-rank",
        ERROR,
        "the file of a rank is not there",
        "copy the file of that rank from the node that wrote it, or name that node's disk with --root",
        True,
    ),
    Code("file-too-short", ERROR, "a file ends before the bytes that its manifest or header promises", _GOOD_COPY),
    Code("empty-file", ERROR, "a file that must hold data has 0 bytes", _GOOD_COPY),
    Code("trailing-bytes", ERROR, "a file goes on after the last byte that its header accounts for", _GOOD_COPY),
    Code(
        "unreferenced-file",
        NOTE,
        "a data file that no manifest names, left by an earlier save into the same directory",
        "delete it if no other tool needs it",
    ),
    Code("unlisted-file", WARNING, "a file that the seal does not list", "seal again if it belongs to the snapshot"),
    Code(
        "reference-outside",
        ERROR,
        "a manifest refers to a file outside the snapshot; it was not read",
        "do not trust this snapshot; find out who changed it",
    ),
    Code(
        "special-file",
        ERROR,
        "a name that should be a regular file is a device, pipe or socket, or a link that leads nowhere",
        "put the file itself there, or the one that the link leads to",
    ),
    Code(
        "missing-index",
        WARNING,
        "all shards are there and no index says which tensor is in which, so loaders will not find them",
        "write the index, or consolidate the shards",
    ),
    Code("unreadable-file", ERROR, "the storage could not read a file", "check permissions and the health of the storage"),
    # containers
    Code("bad-container", ERROR, "a file does not parse as what its name or manifest says it is", _GOOD_COPY),
    Code(
        "unsupported-container",
        ERROR,
        "the file is of a kind that is recognised and not read",
        "convert it with the tool that wrote it",
    ),
    Code("bad-header", ERROR, "a safetensors header is malformed", _GOOD_COPY),
    Code("duplicate-name", ERROR, "one name stands twice where it must be unique", _GOOD_COPY),
    Code("bad-json", ERROR, "a JSON manifest does not parse, or repeats a key", _GOOD_COPY),
    Code("bad-pickle", ERROR, "a pickle does not parse", _GOOD_COPY),
    Code("pickle-limit", ERROR, "a pickle exceeds the limits against memory and depth bombs", "do not trust this file"),
    Code(
        "unsafe-pickle",
        ERROR,
        "a pickle names a function that runs code when loaded by other tools; it was not run",
        "do not load this file with torch or pickle; find out who changed it",
    ),
    Code("storage-mismatch", ERROR, "a storage record has another length than the tensors in it need", _GOOD_COPY),
    Code("extent-overlap", ERROR, "two tensors that must be apart share bytes", _GOOD_COPY),
    Code("extent-gap", ERROR, "bytes between tensors that no header accounts for", _GOOD_COPY),
    Code("unknown-dtype", ERROR, "a dtype that the table does not have", "ask for support of it"),
    Code("checksum-mismatch", ERROR, "stored bytes do not have the CRC-32 that their writer recorded", _GOOD_COPY),
    Code(
        "checksums-off",
        NOTE,
        "the writer recorded no checksums (all CRC-32 fields are zero), so flipped bits cannot be seen without a seal",
        "seal snapshots after saving",
    ),
    Code(
        "container-inconsistent",
        WARNING,
        "two parts of a container disagree about something that does not change a tensor",
        "none needed for the tensors; the file was altered after it was written",
    ),
    # tensors
    Code("uncovered", ERROR, "elements of a tensor that no piece holds", _GOOD_COPY, True),
    Code("pieces-overlap", ERROR, "elements of a tensor that two pieces hold", _GOOD_COPY),
    Code("piece-out-of-bounds", ERROR, "a piece lies outside its tensor", _GOOD_COPY),
    Code("piece-mismatch", ERROR, "a stored piece has another dtype or shape than its manifest says", _GOOD_COPY),
    Code(
        "undefined-elements",
        NOTE,
        "elements that were never set before saving, such as the gaps between the parameters of an optimizer's bucket",
        "none needed; they count as zeros, so that two saves of one state are the same",
    ),
    Code(
        "completeness-unproved",
        NOTE,
        "nothing states the global shape, so a missing last shard could not be seen",
        "compare with another copy, or seal snapshots after saving",
    ),
    Code(
        "index-mismatch",
        ERROR,
        "an index and the headers of the files it names disagree",
        "write the index again from the headers, after checking which is right",
    ),
    Code(
        "not-in-index",
        ERROR,
        "a tensor is in a file and not in the index, so loaders will not see it",
        "write the index again from the headers",
    ),
    Code(
        "total-size-mismatch",
        WARNING,
        "the index states another total size than its tensors have",
        "none needed; loaders ignore it",
    ),
    Code(
        "group-mismatch",
        ERROR,
        "the numbers of a flat parameter group do not add up: shapes, partitions, paddings, slices",
        _GOOD_COPY,
    ),
    Code(
        "foreign-rank",
        ERROR,
        "a rank's file that is not of this save: of another number of ranks, or a rank that there is not",
        "remove the file if the others are whole without it; else restore the files of one save",
    ),
    Code(
        "rounding-mismatch",
        ERROR,
        "a weight is not the rounding of its master copy, so one of them is of another step, order or parameter",
        "use another snapshot; if only the master is right, consolidate --weights fp32 takes it",
    ),
    Code(
        "placement-unstated",
        WARNING,
        "nothing states how tensor-parallel ranks share a parameter, and its name is not a known one",
        "compare a converted tensor with the model before using it",
    ),
    Code(
        "names-unstated",
        NOTE,
        "optimizer state that is stored by position, and more than one name fits",
        "none needed; its entries are named by position",
    ),
    Code("name-collision", ERROR, "two entries have the same dotted name", "rename one of them"),
    Code(
        "no-data",
        WARNING,
        "a tensor or a file without data (meta device, placeholders of partitioned parameters): the values were never saved",
        "save it from a device that holds it",
    ),
    Code(
        "amplification",
        ERROR,
        "a view that expands to far more bytes than are stored",
        "save it expanded (`tensor.contiguous()`) if it is meant",
    ),
    Code("partial-placement", ERROR, "ranks hold unreduced partial sums of a tensor", "reduce it before saving"),
    Code(
        "rank-mismatch",
        ERROR,
        "the files of different ranks disagree about a tensor or about the number of ranks",
        "check that all files are of one save",
    ),
    Code(
        "arguments-mismatch",
        ERROR,
        "the arguments of the training run in a file and the tensors beside them disagree about a size",
        "check that all files are of one save, and that no tensor is missing",
    ),
    Code(
        "no-rule",
        ERROR,
        "nothing says how the parts of a tensor that several tensor-parallel ranks hold go together",
        "ask for a rule for this name; every other tensor is read",
    ),
    Code(
        "optimizer-unnamed",
        NOTE,
        "the optimizer's state is stored by position, and nothing proves which parameter each position is",
        "none needed; the state is listed as each rank holds it",
    ),
    Code(
        "vocabulary-unknown",
        NOTE,
        "nothing states how many rows of the embedding are tokens; the others are padding",
        "give the size of the vocabulary when converting",
    ),
    Code(
        "replica-mismatch",
        ERROR,
        "two copies of the same box of a tensor differ",
        "find out which rank was wrong before going on",
    ),
    Code("step-mismatch", ERROR, "files of the snapshot are from different steps", "use an older snapshot"),
    Code(
        "duplicate-weights",
        WARNING,
        "the directory holds the model twice, in two layouts",
        "name the file or directory that is meant",
    ),
    Code("not-finite", WARNING, "NaN or infinite values", "look at the training run before using this snapshot"),
    Code("noncanonical-bool", WARNING, "a bool tensor holds bytes other than 0 and 1", "none needed; they are kept as they are"),
    # run directories
    Code(
        "tracker-dangling",
        ERROR,
        "a tracker or a link of a run directory names a snapshot that is missing or not committed",
        "start from what `ckpttools latest` prints, not from the tracker",
        True,
    ),
    Code(
        "order-disagrees",
        WARNING,
        "a snapshot of a later step was committed earlier: the run went back, or was copied without its times",
        "none needed; retention keeps the newest of both orders",
    ),
    # comparisons
    Code(
        "seal-broken",
        ERROR,
        "the seal does not have its own digest, so it was changed after it was written",
        "do not trust the seal; compare with another copy",
    ),
    Code("digest-mismatch", ERROR, "values are not those that were expected", _GOOD_COPY),
    Code(
        "dtype-mismatch",
        ERROR,
        "the same tensor has another dtype on the other side",
        "compare checkpoints of the same dtype, or cast one of them",
    ),
    Code(
        "shape-mismatch", ERROR, "the same tensor has another shape on the other side", "check that the two are of the same model"
    ),
    Code(
        "missing-tensor",
        ERROR,
        "a tensor that was expected is not there",
        "pass --allow-missing if one side is meant to be a subset",
    ),
    Code("extra-tensor", ERROR, "a tensor that was not expected", "pass --allow-missing if one side is meant to be a subset"),
)

CODES: dict[str, Code] = {c.code: c for c in TABLE}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, where, what was expected, what was found, what to do."""

    code: str
    where: str
    """File, tensor or both: `model.safetensors`, `layers.0.weight in __0_0.distcp at byte 1577`."""
    expected: str = ""
    found: str = ""
    remedy: str = ""
    severity: str = ""

    def __post_init__(self) -> None:
        row = CODES[self.code]
        object.__setattr__(self, "severity", self.severity or row.severity)
        object.__setattr__(self, "remedy", self.remedy or row.remedy)

    @property
    def is_error(self) -> bool:
        """Whether it makes a checkpoint unfit."""
        return self.severity == ERROR

    @property
    def is_incompleteness(self) -> bool:
        """Whether it says that something is absent rather than wrong."""
        return CODES[self.code].is_incompleteness
