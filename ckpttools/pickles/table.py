"""THE table of names: what each that checkpoints refer to is, and which run code when another tool loads the file.

Reading never depends on it: a name is two strings, whatever it is. A name judged `unsafe` makes a finding, so that a
user knows not to load the file elsewhere; what is neither known nor unsafe is opaque, which is not a promise: loading
the file with torch or pickle imports its module. See `judge`, and `dangers` for the rules.
"""

from __future__ import annotations

from ckpttools.dtypes import BY_NAME, BY_STORAGE_CLASS
from ckpttools.pickles.dangers import is_dangerous
from ckpttools.pickles.records import Global

_SHARDED = "torch.distributed._shard.sharded_tensor"
_OLD_SHARDED = "torch.distributed._sharded_tensor"
_BUILTINS = (
    "set frozenset complex bytearray bytes slice range object list dict tuple int float str bool getattr"
    " xrange long unicode"  # as Python 2 has them
)

_ROWS: tuple[tuple[str, str, str], ...] = (
    # what it is, modules, names
    ("Python type", "builtins __builtin__", _BUILTINS),
    ("codec", "_codecs codecs", "encode"),
    ("maker of an object", "copyreg copy_reg", "_reconstructor __newobj__ __newobj_ex__"),
    ("mapping", "collections", "OrderedDict defaultdict Counter ChainMap"),
    ("sequence", "collections _collections", "deque"),
    ("attributes", "argparse types", "Namespace SimpleNamespace"),
    ("time", "datetime _pydatetime", "datetime date time timedelta timezone"),
    ("time", "zoneinfo", "ZoneInfo ZoneInfo._unpickle"),
    ("time", "time", "struct_time"),
    ("path", "pathlib pathlib._local", "PurePath PurePosixPath PureWindowsPath Path PosixPath WindowsPath"),
    ("number", "decimal _decimal fractions", "Decimal Fraction"),
    ("identifier", "uuid", "UUID SafeUUID"),
    ("random generator", "random", "Random"),
    ("function with arguments", "functools _functools", "partial"),
    ("array", "array", "array _array_reconstructor"),
    ("text or bytes in memory", "io _io", "BytesIO StringIO"),
    ("pattern", "re", "_compile Pattern"),
    ("logger", "logging", "getLogger"),
    ("enum operation", "operator _operator", "or_"),
    ("enum", "signal http inspect", "Signals Handlers HTTPStatus _ParameterKind"),
    ("iterator", "itertools", "count cycle repeat chain"),
    ("iterator", "builtins __builtin__", "enumerate zip reversed iter"),
    # numpy
    ("array", "numpy", "ndarray"),
    ("dtype", "numpy", "dtype"),
    ("array", "numpy.core.multiarray numpy._core.multiarray", "_reconstruct"),
    ("scalar", "numpy.core.multiarray numpy._core.multiarray", "scalar"),
    ("array", "numpy.core.numeric numpy._core.numeric", "_frombuffer"),
    ("random generator", "numpy.random._pickle", "__generator_ctor __bit_generator_ctor __randomstate_ctor"),
    ("random generator", "numpy.random.bit_generator", "SeedSequence"),
    # torch
    ("dtype", "torch", " ".join(BY_NAME)),
    ("storage", "torch torch.storage", " ".join([*BY_STORAGE_CLASS, "UntypedStorage", "TypedStorage", "_UntypedStorage"])),
    ("shape", "torch", "Size"),
    ("device", "torch", "device"),
    ("tensor", "torch", "Tensor"),
    ("random generator", "torch torch._C", "Generator"),
    ("layout", "torch", "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged _mkldnn"),
    ("memory format", "torch", "contiguous_format channels_last channels_last_3d preserve_format"),
    ("memory format", "torch.serialization", "_get_memory_format"),
    ("layout", "torch.serialization", "_get_layout"),
    (
        "quantization scheme",
        "torch",
        "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric per_channel_affine_float_qparams",
    ),
    (
        "tensor",
        "torch._utils",
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_sparse_tensor _rebuild_sparse_csr_tensor"
        " _rebuild_qtensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass"
        " _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor _rebuild_xla_tensor",
    ),
    ("parameter", "torch._utils", "_rebuild_parameter _rebuild_parameter_with_state _rebuild_parameter_v2"),
    ("tensor subclass", "torch._tensor torch.tensor", "_rebuild_from_type _rebuild_from_type_v2"),
    ("parameter", "torch.nn.parameter", "Parameter Buffer UninitializedParameter UninitializedBuffer"),
    ("nested tensor", "torch.nested._internal.nested_tensor", "_rebuild_njt NestedTensor"),
    ("dimension range", "torch._dynamo.decorators", "_DimRange"),
    (
        "TorchScript list",
        "torch.jit._pickle",
        "build_intlist build_tensorlist build_doublelist build_boollist build_tensor_from_id restore_type_tag",
    ),
    # DTensor and ShardedTensor
    ("DTensor", "torch.distributed.tensor torch.distributed.tensor._api torch.distributed._tensor.api", "DTensor"),
    ("DTensor", "torch.distributed._tensor", "DTensor"),
    (
        "DTensor geometry",
        "torch.distributed.tensor._dtensor_spec torch.distributed._tensor._dtensor_spec"
        " torch.distributed._tensor.placement_types",
        "DTensorSpec TensorMeta ShardOrderEntry",
    ),
    (
        "placement",
        "torch.distributed.tensor.placement_types torch.distributed._tensor.placement_types torch.distributed.tensor"
        " torch.distributed._tensor torch._C._distributed",
        "Shard Replicate Partial _Partial _StridedShard _MaskPartial Placement",
    ),
    ("device mesh", "torch.distributed.device_mesh torch.distributed._tensor.device_mesh", "DeviceMesh"),
    ("device mesh", "torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
    ("ShardedTensor", f"{_SHARDED}.api {_OLD_SHARDED}.api", "ShardedTensor"),
    ("shard", f"{_SHARDED}.shard {_OLD_SHARDED}.shard", "Shard"),
    (
        "shard geometry",
        f"{_SHARDED}.metadata {_OLD_SHARDED}.metadata",
        "ShardedTensorMetadata TensorProperties MEM_FORMAT_ENCODING",
    ),
    ("shard geometry", "torch.distributed._shard.metadata", "ShardMetadata"),
    ("shard geometry", "torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    (
        "shard geometry",
        "torch.distributed._shard.sharding_spec torch.distributed._shard.sharding_spec.api",
        "ChunkShardingSpec EnumerableShardingSpec ShardMetadata",
    ),
    ("device", "torch.distributed.remote_device", "_remote_device"),
    # distributed checkpoints
    (
        "checkpoint manifest",
        "torch.distributed.checkpoint.metadata torch.distributed._shard.checkpoint.metadata",
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta"
        " _MEM_FORMAT_ENCODING",
    ),
    (
        "checkpoint manifest",
        "torch.distributed.checkpoint.filesystem torch.distributed._shard.checkpoint.filesystem"
        " bytecheckpoint.checkpointer.meta_type dlrover.trainer.torch.flash_checkpoint.fsdp_engine",
        "_StorageInfo Metadata",
    ),
    (
        "save plan",
        "torch.distributed.checkpoint.planner",
        "SavePlan LoadPlan WriteItem ReadItem WriteItemType LoadItemType TensorWriteData BytesIOWriteData",
    ),
    ("save plan", "megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan MCoreMetadata"),
    # trainers
    ("enum", "megatron.core.enums", "ModelType Fp8Recipe Fp4Recipe"),
    ("enum", "megatron.core.transformer.enums", "AttnBackend AttnMaskType AttnType LayerType ModelType"),
    ("loss scale", "deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler LossScalerBase"),
    ("enum", "deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("fragment", "deepspeed.utils.tensor_fragment", "fragment_address"),
    ("fragment", "deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
)

_KNOWN: dict[tuple[str, str], str] = {
    (module, name): kind for kind, modules, names in _ROWS for module in modules.split() for name in names.split()
}


def describe(name: Global) -> str:
    """What a known name is, for people: `dtype`, `storage`, `tensor`; empty for any other."""
    return _KNOWN.get((name.module, name.name), "")


def judge(name: Global) -> str:
    """`known`, `opaque` or `unsafe`. Pure."""
    if (name.module, name.name) in _KNOWN:
        return "known"
    return "unsafe" if is_dangerous(name.module, name.name) else "opaque"
