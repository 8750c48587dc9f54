"""A program file is data: what somebody wrote into it by hand names, makes and calls nothing.

The laws, for files that are changed at random:
- a bit of the file flipped: a `LoadError` of one line, or the equal result, because every entry has a checksum;
- the JSON changed, with right checksums: a `LoadError` of one line; or an error of the call; or the program that the
  file then says, which may be another one. Never a process that dies, that hangs, or that takes more memory.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize._compat.dispatch import all_op_names
from functionalize.errors import LoadError
from functionalize.program import callable_ops
from functionalize.program.field_types import checked
from functionalize.program.known_types import Types
from functionalize.program.text_formats import check_spec, check_template
from functionalize.util import structure
from tests.program import hostile

Json = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    hostile.write_files(made)
    return made


def changed(folder: Path, to: Path, change: Callable[[Json], None], kind: str = "program") -> Path:
    """The file with its JSON changed."""
    with zipfile.ZipFile(folder / f"{kind}.fzp") as archive:
        content = json.loads(archive.read("programs.json"))
    change(content)
    hostile.rewritten(folder / f"{kind}.fzp", to, content)
    return to


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        fz.load(path, **options)
    said = str(error.value)
    assert said.count("\n") == 0
    return said.partition("cannot be loaded: it ")[2]


def child(*args: Any, timeout: float = 600) -> Any:
    """What `tests.program.hostile` prints in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.program.hostile", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    now = Path(args[1]) / f"now-{Path(str(args[-1])).name}"
    tried = now.read_text() if now.exists() else ""
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]} while {tried[:2000]}"
    return json.loads(done.stdout.splitlines()[-1])


# -- files that are made to run code ---------------------------------------------------------------


def record(content: Json, kind: str) -> Json:
    return next(r for r in content["records"] if r["is"] == kind)


def a_class_with_a_finalizer(content: Json) -> None:
    name = "_URLopener__"
    shape = [{"type": "urllib.request:URLopener"}, {"tuple": []}]
    names = {"tuple": [f"{name}tempfiles", f"{name}unlink", "tempcache"]}
    record(content, "_Shape")["with"] = [*shape, names, {"tuple": []}]
    outputs = content["programs"][0]["outputs"]["tuple"]
    for i, value in enumerate(([["/bin/sh", "-c", "true"]], {"type": "subprocess:Popen"}, None)):
        content["records"].append({"is": "Constant", "with": [value, False]})
        outputs[i] = {"record": len(content["records"]) - 1}


def a_version_of_nothing(content: Json) -> None:
    """The input is said to be inside of another tensor."""
    record(content, "InputSpec")["with"][-1] = "raised around"


def first_call(content: Json) -> list[Any]:
    graph = content["programs"][0]["graph"]
    return next(node for node in graph if node[0] == "call_function")


def a_type_as_op(content: Json) -> None:
    first_call(content)[2] = {"type": "subprocess:Popen"}


def a_function_as_op(content: Json) -> None:
    first_call(content)[2] = {"function": "os.system"}


def a_file_that_is_mapped(content: Json) -> None:
    call = first_call(content)
    call[2:5] = [{"op": "aten.from_file.default"}, ["./made-by-a-file", True, 10], {}]


def code_in_a_name(content: Json) -> None:
    call = first_call(content)
    call[4] = {"dim=print()": 1}


def code_in_an_index(content: Json) -> None:
    graph = content["programs"][0]["graph"]
    part = next(n for n in graph if n[2] == {"function": "operator.getitem"})
    part[3][1] = "__import__('os').system('true')"


def code_in_a_placeholder(content: Json) -> None:
    content["programs"][0]["graph"][0][2] = "x, y=print()"


def a_code_of_ours(content: Json) -> None:
    record(content, "_Shape")["with"][0] = {"type": "functionalize.program.archive:Path"}


def a_runner(content: Json) -> None:
    content["programs"][0]["runner"] = "os.system"


def a_class_of_torch(content: Json) -> None:
    record(content, "_Shape")["with"][0] = {"type": "torch.nn.modules.linear:Linear"}


def an_attribute_of_the_class(content: Json) -> None:
    record(content, "_Shape")["with"][2]["tuple"][0] = "__class__"


def a_tensor_beyond_its_storage(content: Json) -> None:
    view = record(content, "InputView")
    geometry = content["records"][view["with"][1]["record"]]
    geometry["with"][:2] = [{"Size": [10**6]}, {"tuple": [1]}]


def a_library(content: Json) -> None:
    first_call(content)[2] = {"op": "loaded_libraries.add.default"}


def a_namespace(content: Json) -> None:
    first_call(content)[2] = {"op": "profiler._record_function_enter.default"}


def an_attribute_that_is_special(content: Json) -> None:
    record(content, "Argument")["with"][1] = {"tuple": ["__init__"]}


def a_field_of_another_type(content: Json) -> None:
    record(content, "Result")["with"][0] = "0"


def a_forward_reference(content: Json) -> None:
    content["records"][0]["with"][0] = {"record": 5}


def a_record_in_itself(content: Json) -> None:
    content["records"].append(
        {"is": "Constant", "with": [{"record": len(content["records"])}, False]}
    )


def a_value_doubled_often(content: Json) -> None:
    records = content["records"]
    for _ in range(64):
        last = {"record": len(records) - 1}
        records.append({"is": "Constant", "with": [{"tuple": [last, last]}, False]})


def a_power(content: Json) -> None:
    call = first_call(content)
    call[2:5] = [{"function": "operator.pow"}, [10, 10**10], {}]


def a_format(content: Json) -> None:
    call = first_call(content)
    call[2:5] = [{"function": "format"}, [1, "999999999999d"], {}]


def a_format_that_is_none(content: Json) -> None:
    call = first_call(content)
    call[2:5] = [{"function": "format"}, [1, "!!"], {}]


def a_place_to_round_to(content: Json) -> None:
    call = first_call(content)
    call[2:5] = [{"function": "round"}, [1, -(10**10)], {}]


def a_large_integer(content: Json) -> None:
    first_call(content)[3] = [10**400]


def python_objects(content: Json) -> None:
    data = {"numpy": ["|O8", [1], "AAAAAAAAAAA=", True]}
    content["records"].append({"is": "Constant", "with": [data, False]})


HOSTILE: dict[str, tuple[Callable[[Json], None], str]] = {
    each.__name__: (each, said)
    for each, said in (
        (a_class_with_a_finalizer, "needs the type URLopener of the module urllib.request"),
        (a_version_of_nothing, "has an input of no such version"),
        (a_type_as_op, "needs the type Popen of the module subprocess"),
        (a_function_as_op, "names the function os.system"),
        (a_file_that_is_mapped, "calls aten.from_file.default, which"),
        (code_in_a_name, "has a node that is none"),
        (code_in_an_index, "takes a part that is none of a result"),
        (code_in_a_placeholder, "has a node that is none"),
        (a_code_of_ours, "needs the type Path of the module functionalize.program.archive"),
        (a_runner, "is run by 'os.system', which is not a runner"),
        (a_class_of_torch, "needs the type Linear"),
        (
            an_attribute_of_the_class,
            "has a functionalize.util.structure:Opened of another structure",
        ),
        (a_tensor_beyond_its_storage, "has a tensor larger than its storage"),
        (a_library, "names the op loaded_libraries.add.default"),
        (a_namespace, "names the op profiler._record_function_enter.default"),
        (an_attribute_that_is_special, "reads the attribute '__init__'"),
        (a_field_of_another_type, "has a Result whose `slot` is a str"),
        (a_forward_reference, "refers to number 5 of 0"),
        (a_record_in_itself, "refers to number"),
        (a_value_doubled_often, "holds a value that contains itself too often"),
        (a_power, "computes a number that is too large"),
        (a_format, "prints a number in a format"),
        (a_format_that_is_none, "prints a number in a format"),
        (a_place_to_round_to, "computes a number that is too large"),
        (a_large_integer, "holds a number that no program has"),
        (python_objects, "holds an array that is none"),
    )
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    change, said = HOSTILE[name]
    assert refused(changed(folder, tmp_path / "hostile.fzp", change)).startswith(said)


def test_hostile_files_make_nothing_happen(folder: Path, tmp_path: Path) -> None:
    """Python's audit hooks see that the files themselves are read, and nothing else."""
    paths = [
        changed(folder, tmp_path / f"{name}.fzp", change) for name, (change, _) in HOSTILE.items()
    ]
    events = child("audited", folder, *paths)
    assert [e for e in events if e.startswith("result")] == ["result refused"] * len(paths)
    assert {e for e in events if not e.startswith("result")} <= {f"open to read {p}" for p in paths}


def huge(content: Json) -> None:
    call = first_call(content)
    sizes = [[10**12, 4]]
    call[2:5] = [{"op": "aten.zeros.default"}, sizes, {}]


def test_a_size_that_no_machine_has_is_an_error_of_the_call(folder: Path, tmp_path: Path) -> None:
    path = changed(folder, tmp_path / "huge.fzp", huge)
    assert hostile.tried("program", path).startswith(("error", "refused"))


def test_a_program_that_is_called_makes_our_code_run_and_nothing_else(folder: Path) -> None:
    """A file that nobody changed: the same events, and the code that we make of the graph."""
    path = folder / "program.fzp"
    events = child("audited", folder, path)
    (result,) = [each for each in events if each.startswith("result")]
    assert len(result) == len("result ") + 64
    events.remove(result)
    ours = "<functionalize boxed program>"
    allowed = {f"open to read {path}", f"compile {ours}", f"exec {ours}"}
    assert set(events) <= allowed
    assert f"exec {ours}" in events


# -- ops -------------------------------------------------------------------------------------------


def test_no_op_that_a_file_may_call_has_the_name_of_a_file() -> None:
    """Every op of this process: its text is an option, it holds no object of C++, and it leaves storages alone."""
    allowed: dict[str, Any] = {}
    for name in all_op_names():
        packet, _, overload = name.partition(".")
        namespace, _, packet = packet.partition("::")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        op = getattr(found, overload or "default", None)
        if op is not None and callable_ops.why_not(op) is None:
            allowed[name] = op
    assert "aten::add.Tensor" in allowed and "aten::_foreach_add_.List" in allowed
    assert len(allowed) > 2000
    for name, op in allowed.items():
        assert name.partition("::")[0] in callable_ops.NAMESPACES
        for argument in op._schema.arguments:
            if "str" in str(argument.type):
                assert not any(w in argument.name for w in ("file", "path", "name", "lib")) or (
                    argument.name == "group_name"
                ), name
            assert "class" not in str(argument.type) and "Storage" not in str(argument.type), name
            assert argument.name != "unsafe", name
    suspicious = (
        *(
            "from_file",
            "from_file.out",
            "set_",
            "set_.source_Storage",
            "set_.source_Tensor",
            "resize_",
        ),
        *(
            "resize_as_",
            "_reshape_alias",
            "_print",
            "_resize_output_",
            "set_data",
            "save",
            "record_stream",
        ),
        *("_test_string_default", "_sparse_coo_tensor_unsafe", "_index_put_impl_"),
    )
    assert not [name for name in suspicious if f"aten::{name}" in allowed]
    others = ("debugprims", "profiler", "quantized", "mkldnn", "symm_mem", "onnx", "static_runtime")
    assert not [name for name in allowed if name.startswith(others)]
    assert not {"inductor::resize_storage_bytes_", "inductor::_reinterpret_tensor"} & set(allowed)


def test_a_custom_op_is_called_if_its_namespace_is_allowed(tmp_path: Path) -> None:
    @torch.library.custom_op("tests_files::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    fz.functions.trace(lambda x: twice(x) + 1, torch.ones(2)).save(tmp_path / "op.fzp")
    said = refused(tmp_path / "op.fzp")
    assert said.startswith("names the op tests_files.twice.default")
    assert said.endswith("import it and pass `ops=['tests_files']` to `load`")
    loaded = fz.load(tmp_path / "op.fzp", ops=["tests_files"])
    assert torch.equal(loaded(torch.ones(2)), torch.full((2,), 3.0))

    def step(x: Tensor) -> Tensor:
        return twice(x) + 1

    captured = fz.capture(step)
    for _ in range(3):
        captured(torch.ones(2))
    captured.save(tmp_path / "step.fzp")
    again = fz.capture(step)
    again.load(tmp_path / "step.fzp")  # the code of the step names the op
    again(torch.ones(2))
    assert (again.stats.replays, again.stats.captures) == (1, 0)


# -- types -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: float


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Computes:
    """A class whose attribute is set by its own code."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    @property
    def size(self) -> int:
        return 2

    @size.setter
    def size(self, value: int) -> None:
        raise AssertionError("called")


def test_a_type_of_the_user_is_handed_over(tmp_path: Path) -> None:
    for kind, out in ((Batch, lambda x: Batch(x * 2, 1.5)), (Pair, lambda x: Pair(x, x + 1))):
        path = tmp_path / f"{kind.__name__}.fzp"
        fz.functions.trace(out, torch.ones(2)).save(path)
        said = refused(path)
        assert said.startswith(f"needs the type {kind.__name__} of the module {__name__}, which")
        assert said.endswith(f"import it and pass `types=[{kind.__name__}]` to `load`")
        made = fz.load(path, types=[kind])(torch.ones(2))
        assert type(made) is kind
        assert hostile.digest(made) == hostile.digest(out(torch.ones(2)))


def test_a_live_step_hands_over_the_types_that_its_code_names(tmp_path: Path) -> None:
    def step(x: Tensor) -> Any:
        return {"batch": Batch(x * 2, 1.5), "pair": Pair(x, x + 1)}

    captured = fz.capture(step)
    for _ in range(3):
        captured(torch.ones(2))
    captured.save(tmp_path / "step.fzp")
    again = fz.capture(step)
    again.load(tmp_path / "step.fzp")
    made = again(torch.ones(2))
    assert (again.stats.replays, type(made["batch"]), type(made["pair"])) == (1, Batch, Pair)


def test_no_code_of_a_class_runs_where_an_object_is_made_of_it() -> None:
    shape = structure.PARTS_OF_SPECS[0]
    assert structure.is_shape(shape(Computes, (), ("x",), ()), 1)
    assert not structure.is_shape(shape(Computes, (), ("size",), ()), 1)
    assert not structure.is_shape(shape(Computes, (), ("__class__",), ()), 1)
    assert not structure.is_shape(shape(Computes, (), ("__dict__",), ()), 1)
    assert not structure.is_shape(shape(subprocess.Popen, (), ("args",), ()), 1)
    assert not structure.is_shape(shape(nn.Linear, (), ("weight",), ()), 1)
    assert not structure.is_shape(shape(Computes, (), ("x",), ()), 2)


def test_types_of_torch_and_python_are_known_without_a_look_at_modules() -> None:
    known = Types()
    assert known.of("builtins:dict") is dict and known.of("builtins:NoneType") is type(None)
    for name in (
        "os:_wrap_close",
        "builtins:eval",
        "builtins:object",
        "builtins:type",
        "x",
        "a:b:c",
    ):
        with pytest.raises(LoadError):
            known.of(name)


def test_a_field_is_of_its_annotated_type() -> None:
    @dataclasses.dataclass
    class Local:
        a: tuple[int, ...]
        b: dict[str, float] | None
        c: tuple[str, int]

    right = ((1, 2), {"x": 1}, ("a", 3))
    Local.__annotations__.update(a=tuple[int, ...], b=dict[str, float] | None, c=tuple[str, int])
    assert checked(Local, right) == right
    for at, wrong in (
        (0, (1, "2")),
        (0, [1]),
        (1, {1: 1.0}),
        (1, ()),
        (2, ("a",)),
        (2, (3, "a")),
        (0, (True,)),
    ):
        values = list(right)
        values[at] = wrong
        with pytest.raises(LoadError, match="has a Local whose"):
            checked(Local, values)
    with pytest.raises(LoadError, match="has a Local of 2 fields"):
        checked(Local, right[:2])


# -- formats ---------------------------------------------------------------------------------------


def test_formats_that_steps_have_are_those_that_files_may_have() -> None:
    known = (
        "",
        "8d",
        ">8.3f",
        "0>5",
        "*^9",
        "+.2e",
        ",",
        ",.2f",
        "_d",
        "#x",
        "05d",
        "%",
        ".1%",
        "n",
    )
    for spec in known:
        check_spec(spec, LoadError)
        assert format(1.0 if "f" in spec or "e" in spec or "%" in spec else 1, spec)
    for spec in ("1000d", ".1000f", "0000000999999d", "٩٩٩٩d", "!", "8q", "8d ", 8, None):
        with pytest.raises(LoadError, match="prints a number in a format"):
            check_spec(spec, LoadError)


def test_templates_that_steps_have_are_those_that_files_may_have() -> None:
    known: tuple[tuple[str, Any], ...] = (
        ("100000 steps", ()),
        ("%d of 100000: %-8.3f%%", (1, 1)),
        ("%+05d %s %r %c", (1, "a", "b", 1)),
        ("%(a)s %(b)5d", {"a": "x", "b": 1}),
    )
    for template, args in known:
        made = template % args
        assert check_template(template, args, LoadError, 10_000) >= len(made)
    wrong: tuple[tuple[Any, Any], ...] = (
        *(("%1000d", (1,)), ("%.1000f", (1,)), ("%*d", (5, 1)), ("%-01000d", (1,))),
        *(("%d", ()), ("%d", (1, 1)), ("%d", ("a",)), ("%y", (1,)), ("%", (1,)), ("%(a)s", (1,))),
        *(
            ("%(b)s", {"a": 1}),
            ("%s" * 1000, ("x" * 100,) * 1000),
            ("%(a)s" * 99, {"a": "x" * 999}),
        ),
        (None, ()),
    )
    for template, args in wrong:
        with pytest.raises(LoadError):
            check_template(template, args, LoadError, 10_000)


# -- sizes -----------------------------------------------------------------------------------------


def test_an_entry_that_says_it_is_large_takes_no_memory(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bomb.fzp"
    bomb = {"programs.json": b" " * 2**25}
    with zipfile.ZipFile(folder / "program.fzp") as old:
        entries = {name: bomb.get(name) or old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries.items():
            new.writestr(name, data)
    assert (
        refused(path) == "has a programs.json that says it is larger than it can be: it is damaged"
    )


def test_a_file_takes_twice_its_bytes_at_most(folder: Path) -> None:
    """Constants are read into their storages: 96 MB of them, loaded and called, are there once."""
    child("large", folder, 96 << 20, 0)


def of_constants(content: Json) -> Json:
    return next(iter(content["constants"]["tensors"].values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["constants"]["storages"].append(10**15), "has constants of other sizes"),
        (lambda c: of_constants(c).__setitem__(2, [10**9]), "beyond its storage"),
        (lambda c: of_constants(c).__setitem__(3, [2**61]), "beyond its storage"),
        (lambda c: of_constants(c).__setitem__(4, 10**6), "beyond its storage"),
        (lambda c: of_constants(c).__setitem__(4, -1), "which is none"),
        (lambda c: of_constants(c).__setitem__(0, 5), "of no storage"),
        (lambda c: of_constants(c).__setitem__(1, "nn"), "which is none"),
        (lambda c: of_constants(c).__setitem__(5, "shell"), "is damaged: RuntimeError"),
    ],
)
def test_a_constant_lies_inside_the_bytes_of_the_file(
    change: Callable[[Json], None], said: str, folder: Path, tmp_path: Path
) -> None:
    assert said in refused(changed(folder, tmp_path / "x.fzp", change))


def test_constants_keep_their_bits_their_strides_and_their_storage(tmp_path: Path) -> None:
    def fn(x: Tensor) -> Any:
        base = torch.tensor([[1.0, 2.0, -0.0], [4.0, 5.0, float("nan")]])
        return x + base, x.t() * base.t(), base.t(), torch.tensor([1 + 2j]), torch.tensor([True])

    x = torch.ones(2, 3)
    program = fz.functions.trace(fn, x)
    program.save(tmp_path / "c.fzp")
    loaded = fz.load(tmp_path / "c.fzp")
    assert hostile.digest(loaded(x)) == hostile.digest(program(x)) == hostile.digest(fn(x))
    assert [t.stride() for t in loaded(x)] == [t.stride() for t in program(x)]


# -- files that are changed at random --------------------------------------------------------------


def test_mutations(folder: Path) -> None:
    seen = child("mutations", folder, 60, 11)
    assert sum(seen.values()) == 60 and seen["refused"] > 20 and seen["equal"] > 0


def test_flipped_bits(folder: Path) -> None:
    seen = child("flips", folder, 60, 12)
    assert sum(seen.values()) == 60 and seen["refused"] > 30


@pytest.mark.fuzz
@pytest.mark.parametrize("start", range(10))
def test_many_mutations(start: int, folder: Path) -> None:
    assert sum(child("mutations", folder, 500, start).values()) == 500


@pytest.mark.fuzz
@pytest.mark.parametrize("start", range(4))
def test_many_flipped_bits(start: int, folder: Path) -> None:
    assert sum(child("flips", folder, 500, start).values()) == 500
