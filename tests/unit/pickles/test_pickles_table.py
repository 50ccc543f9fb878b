"""Names are known, opaque or unsafe: no sound fixture refers to an unsafe one, and every known way to run code is one."""

from __future__ import annotations

import pickle

import pytest

from ckpttools.pickles.limits import PickleError
from ckpttools.pickles.reader import read_pickle
from ckpttools.pickles.records import Global
from ckpttools.pickles.table import describe, judge
from ckpttools.pickles.writer import write_pickle
from tests import pickle_cases as cases

UNSAFE_NAMES = """
    builtins:eval builtins:exec builtins:compile builtins:__import__ builtins:open builtins:type builtins:map builtins:vars
    builtins:setattr builtins:delattr builtins:globals builtins:input builtins:print builtins:getattr(...) builtins:call(...)
    __builtin__:eval __builtin__:execfile __builtin__:apply __builtin__:file __builtin__:reload os:system os:popen os:remove
    posix:system nt:system os.path:join posixpath:join subprocess:Popen subprocess:run commands:getoutput sys:exit
    sys:modules shutil:rmtree runpy:run_path runpy:_run_code socket:socket socket:create_connection importlib:import_module
    importlib.util:find_spec importlib.machinery:SourceFileLoader _frozen_importlib:_gcd_import pty:spawn ctypes:CDLL
    ctypes.util:find_library code:InteractiveInterpreter codeop:compile_command webbrowser:open pickle:loads pickle:Unpickler
    _pickle:loads cPickle:loads dill:loads dill._dill:_load_type cloudpickle.cloudpickle:_make_function joblib:load
    shelve:open marshal:loads types:FunctionType types:CodeType types:MethodType types:ModuleType operator:attrgetter
    operator:methodcaller _operator:methodcaller functools:reduce functools:cached_property multiprocessing:Process
    multiprocessing.reduction:rebuild_connection threading:Thread _thread:start_new_thread asyncio:run
    asyncio.unix_events:_UnixSubprocessTransport concurrent.futures:ProcessPoolExecutor tempfile:NamedTemporaryFile io:open
    _io:open io:FileIO _io:FileIO io:open_code codecs:open pathlib:Path.write_text pathlib:Path.unlink pathlib:Path.home
    zipfile:ZipFile tarfile:open sqlite3:connect timeit:timeit timeit:main pdb:run pdb:Pdb bdb:Bdb trace:Trace cProfile:run
    cProfile:runctx profile:Profile doctest:debug pydoc:locate pydoc:pipepager pkgutil:resolve_name inspect:getsource
    linecache:getline distutils.spawn:spawn distutils.core:run_setup pip:main pip._internal:main setuptools:sandbox
    venv:create ensurepip:bootstrap urllib.request:urlopen urllib2:urlopen http.client:HTTPConnection httplib:HTTPConnection
    requests:get requests.api:get aiohttp.client:ClientSession smtplib:SMTP ftplib:FTP xmlrpc.client:ServerProxy
    imaplib:IMAP4_stream logging.config:listen logging:FileHandler idlelib.run:main lib2to3.pgen2.pgen:ParserGenerator
    test.support:captured_output uuid:_get_command_stdout _aix_support:_read_cmd_output platform:popen mailbox:Maildir
    signal:signal atexit:register gc:get_objects ast:literal_eval argparse:FileType.open string:capwords
    collections:namedtuple enum:_decompose copyreg:pickle copyreg:add_extension numpy:load numpy:fromfile numpy:memmap
    numpy:savetxt numpy.testing._private.utils:runstring numpy.f2py:compile numpy.f2py.crackfortran:getlincoef
    numpy.distutils.exec_command:exec_command numpy.lib.npyio:load numpy.ctypeslib:load_library numpy:ndarray.tofile
    numpy.core.multiarray:fromfile pandas:read_pickle pandas.io.pickle:read_pickle pandas:eval yaml:load yaml:unsafe_load
    jinja2:Template sympy:compile torch:load torch:save torch:compile torch.serialization:load torch.serialization:_load
    torch.serialization:os torch.hub:load torch.hub:load_state_dict_from_url torch.jit:load
    torch.jit.unsupported_tensor_ops:execWrapper torch.storage:_load_from_bytes torch.package:PackageImporter
    torch.fx.graph_module:reduce_graph_module torch.fx.graph:_exec torch._dynamo.guards:eval
    torch._inductor.codecache:compile_file torch.ops:load_library torch.classes:load_library
    torch.utils.cpp_extension:load_inline torch.utils.bottleneck.__main__:run_cprofile torch.utils.collect_env:run
    torch.utils._config_module:load_config torch.utils.data.datapipes.utils.decoder:basichandlers
    torch.utils.model_zoo:load_url torch.distributed.rpc:rpc_sync torch.distributed.run:main torch.multiprocessing:spawn
    torch.testing._internal:run_tests torch:UntypedStorage.from_file torch.storage:UntypedStorage.from_file torch:os.system
    torch.nn:modules.os.system torch:Tensor.__class__ torch._utils:_rebuild_tensor_v2.__globals__ numpy:ndarray.__reduce__
    m:__subclasses__ m:a.__init__.b anything:os anything:sys.modules anything:Thing.eval anything:load
    transformers:AutoModel.from_pretrained
"""

HARMLESS_NAMES = """
    builtins:set builtins:frozenset builtins:complex builtins:bytearray builtins:slice builtins:range builtins:object
    builtins:list builtins:dict builtins:tuple builtins:int builtins:float builtins:str builtins:bytes builtins:bool
    builtins:getattr __builtin__:getattr __builtin__:unicode __builtin__:long __builtin__:xrange builtins:ValueError
    exceptions:ValueError collections:OrderedDict collections:deque argparse:Namespace datetime:datetime datetime:timezone
    pathlib:PosixPath pathlib._local:PosixPath pathlib:PureWindowsPath functools:partial _codecs:encode
    copyreg:_reconstructor copy_reg:_reconstructor types:SimpleNamespace decimal:Decimal uuid:UUID io:BytesIO _io:BytesIO
    random:Random signal:Signals logging:getLogger numpy:ndarray numpy:dtype numpy.core.multiarray:scalar
    numpy._core.multiarray:_reconstruct numpy.random._pickle:__generator_ctor torch:float32 torch:Size torch:device
    torch:FloatStorage torch.storage:UntypedStorage torch:BFloat16Storage torch._utils:_rebuild_tensor_v2
    torch._utils:_rebuild_parameter torch._tensor:_rebuild_from_type_v2 torch.serialization:_get_layout
    torch.nn.parameter:Parameter torch.jit._pickle:build_intlist torch._dynamo.decorators:_DimRange
    torch.distributed.tensor:DTensor torch.distributed._tensor.placement_types:Shard torch.distributed.device_mesh:DeviceMesh
    torch.distributed._shard.sharded_tensor.api:ShardedTensor torch.distributed.checkpoint.metadata:Metadata
    deepspeed.runtime.zero.config:ZeroStageEnum deepspeed.utils.tensor_fragment:fragment_address
    megatron.core.transformer.enums:AttnBackend megatron.core.enums:ModelType __main__:Config
    transformers.training_args:TrainingArguments torch.nn.modules.linear:Linear torch.nn.functional:gelu
    omegaconf.dictconfig:DictConfig my.module:Outer.Inner my.enums:Mode.fast
"""


def named(text: str) -> Global:
    return Global(*text.split(":"))


@pytest.mark.parametrize("name", UNSAFE_NAMES.split())
def test_a_name_that_runs_code_elsewhere_is_unsafe(name):
    assert judge(named(name)) == "unsafe"


@pytest.mark.parametrize("name", HARMLESS_NAMES.split())
def test_a_name_that_checkpoints_refer_to_is_not_unsafe(name):
    assert judge(named(name)) in ("known", "opaque")


@pytest.mark.parametrize(
    "name", ["transformers.training_args:TrainingArguments", "__main__:Config", "torch.nn.modules.linear:Linear"]
)
def test_a_class_of_some_package_is_opaque(name):
    assert judge(named(name)) == "opaque"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("torch:bfloat16", "dtype"),
        ("torch:HalfStorage", "storage"),
        ("torch.storage:UntypedStorage", "storage"),
        ("torch._utils:_rebuild_tensor_v3", "tensor"),
        ("torch.distributed.tensor.placement_types:_StridedShard", "placement"),
        ("my:thing", ""),
    ],
)
def test_a_known_name_is_described(name, what):
    assert describe(named(name)) == what


@pytest.mark.parametrize("protocol", [2, 4])
def test_getattr_that_reaches_code_is_unsafe_by_the_name_it_reaches(protocol):
    gadget = cases.call("getattr", cases.call("getattr", Global("torch._utils", "_rebuild_tensor_v2"), "__globals__"), "get")
    names = read_pickle(write_pickle(gadget, protocol=protocol)).globals
    assert "unsafe" in {judge(name) for name in names}


def test_getattr_of_an_object_is_unsafe():
    names = read_pickle(b"c__builtin__\ngetattr\n(cm\nA\n)RS'run'\ntR.").globals
    assert "unsafe" in {judge(name) for name in names}


def test_an_enum_member_written_with_getattr_is_not_unsafe():
    names = read_pickle(pickle.dumps(cases.Outer.Inner.ONE, 2)).globals
    assert "unsafe" not in {judge(name) for name in names}


def test_no_sound_fixture_refers_to_an_unsafe_name():
    if not cases.FIXTURES.is_dir():
        pytest.skip("there are no fixtures in this checkout")
    unsafe = set()
    for name, data, start in cases.fixture_pickles():
        try:
            found = read_pickle(data, offset=start).globals
        except PickleError:
            assert "dmg_" in name or "damaged_" in name, name
            continue
        unsafe |= {(name.split("/")[1], str(g)) for g in found if judge(g) == "unsafe"}
    assert unsafe == {("dmg_metadata_malicious_pickle", "io.open"), ("dmg_pickle_malicious", "io.open")}
