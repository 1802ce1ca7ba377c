"""What vllm-kvx replaces in vLLM and calls of its internals, against the vLLM that is installed."""

import ast
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import vllm
from record_vllm_signatures import recorded
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

import vllm_kvx
from vllm_kvx.compat import vllm_signatures as seams
from vllm_kvx.worker.worker import PolicyWorker

PACKAGE = Path(vllm_kvx.__file__).parent


def modules_on_vllm() -> Iterator[Any]:
    """Our modules that import vLLM as they are imported."""
    for info in pkgutil.walk_packages([str(PACKAGE)], "vllm_kvx."):
        path = PACKAGE.joinpath(*info.name.split(".")[1:])
        source = path / "__init__.py" if info.ispkg else path.with_suffix(".py")
        if not source.exists():
            continue  # The CUDA ops, where they are built beside it.
        if re.search(r"^(from|import) vllm\b", source.read_text(), re.MULTILINE):
            yield import_module(info.name)


def test_every_class_on_one_of_vllms_is_compared() -> None:
    paths = [path for part in seams.CLASSES.values() for path in part]
    listed = [getattr(import_module(p.split(":")[0]), p.split(":")[1]) for p in paths]
    compared = {base for cls in listed for base in cls.__mro__}
    on_vllm = {
        cls
        for module in modules_on_vllm()
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and cls.__module__ == module.__name__
        and any(base.__module__.startswith("vllm.") for base in cls.__mro__)
    }
    assert len(on_vllm) >= len(listed), "the walk finds them"
    assert on_vllm <= compared, "add it to CLASSES"


def imports_of_vllm() -> Iterator[tuple[str, str]]:
    """What our source imports of vLLM, in functions too: (module, name)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
                yield from ((str(node.module), alias.name) for alias in node.names)


def test_all_that_is_imported_of_vllm_is_there() -> None:
    missing = []
    for module, name in sorted(set(imports_of_vllm())):
        try:
            if not hasattr(import_module(module), name):
                import_module(f"{module}.{name}")
        except ImportError as error:
            missing.append(f"from {module} import {name}: {error}")
    assert not missing


def functions_within(tree: ast.AST, within: bool = False) -> Iterator[str]:
    """Names of functions that are made in functions."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef)
        if is_function and within:
            yield node.name
        yield from functions_within(node, is_function or within)


def replaced_names() -> Iterator[str]:
    """What our code that runs in vLLM puts in the place of an attribute of something else."""
    parts = ("worker", "cache", "models", "server")
    for path in (
        PACKAGE / "plugin.py",
        *(p for part in parts for p in (PACKAGE / part).rglob("*.py")),
    ):
        tree = ast.parse(path.read_text())
        functions = set(functions_within(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "wrap_once":
                yield ast.literal_eval(node.args[1])
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                many = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                targets = target.elts if many else [target]
                values = node.value.elts if many else [node.value]
                for left, right in zip(targets, values, strict=True):
                    ours = isinstance(right, ast.Name) and right.id in functions
                    if ours and isinstance(left, ast.Attribute):
                        yield left.attr


def test_every_function_in_the_place_of_one_of_vllms_is_compared() -> None:
    listed = {path.replace(":", ".").split(".")[-1] for p in seams.REPLACED.values() for path in p}
    # A constructor of a model of vLLM's is pydantic's.
    found = set(replaced_names()) - {"__init__"}
    assert {"create_engine_config", "capture", "get_kv_cache_spec"} <= found, "the walk finds them"
    assert found == listed


def test_what_is_listed_as_called_is_called() -> None:
    source = "\n".join(
        p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "vllm_signatures.py"
    )
    names = {path.replace(":", ".").split(".")[-1] for p in seams.CALLED.values() for path in p}
    assert {name for name in names if not re.search(rf"\b{name}\(", source)} == set()


def test_the_table_is_of_this_vllm_and_no_more() -> None:
    line, table = seams.release_line(vllm.__version__), seams.read_table()
    here = {(seam.owner, seam.name): seam for seam in seams.all_seams()}
    for (owner, name), seam in here.items():
        assert seam.now, f"{seam.where} is not there"
        assert line in table[owner][name][seam.now], "run tests/record_vllm_signatures.py"
    for owner, names in table.items():
        for name, known in names.items():
            assert (owner, name) in here, f"{owner} {name}: nothing depends on it any more"
            by = [each for lines in known.values() for each in lines]
            assert sorted(by) == sorted(seams.SUPPORTED_VLLM), "record it with every release"


def test_this_vllm_is_served() -> None:
    seams.check_server()
    seams.check_engine(PolicyWorker)


def nothing(*_: Any) -> None:
    """What a changed method does."""


def more(self: Any, request: Any, why: str) -> None: ...
def renamed(self: Any, req: Any) -> None: ...
def with_option(self: Any, request: Any, why: str = "") -> None: ...
def keyword(self: Any, request: Any, *, why: str = "") -> None: ...
def fewer(self: Any) -> None: ...
def between(self: Any, more: int = 0, throttle_prefills: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "now", "text"),
    [
        (Scheduler, "_free_blocks", more, r"_free_blocks is \(self, request, why\), and was"),
        (Scheduler, "add_request", renamed, r"Scheduler.add_request is \(self, req\), and was"),
        (Scheduler, "add_request", with_option, r"add_request is \(self, request, why=\.\.\.\)"),
        (Scheduler, "_free_blocks", keyword, r"_free_blocks is \(self, request, \*, why=\.\.\.\)"),
        (Scheduler, "schedule", between, r"schedule is \(self, more=\.\.\., throttle_prefills"),
        (Scheduler, "_preempt_request", None, "Scheduler._preempt_request is gone, and was"),
        (DefaultModelState, "remove_request", fewer, "DefaultModelState.remove_request is"),
        (
            FullAttentionManager,
            "shrink",
            nothing,
            "shrink is new, and .*FirstStageKVCacheManager would",
        ),
        (Scheduler, "schedule", property(nothing), "schedule is no method, and was"),
        (BlockPool, "_insert_block_hash", None, "_insert_block_hash is gone"),
    ],
)
def test_a_method_that_differs_stops_the_start(
    owner: type, name: str, now: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not even with the override: each would fail at the first request, or sooner.
    monkeypatch.setenv(seams.OVERRIDE_VARIABLE, "1")
    if now is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, now, raising=False)
    with pytest.raises(RuntimeError, match=text) as error:
        seams.check_engine(PolicyWorker)
    for part in (vllm.__version__, "0.32.* or 0.33.*"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_wrappers_of_other_packages_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass on what they are given; what they wrap they do not always say."""
    monkeypatch.setattr(Scheduler, "schedule", lambda *args, **kwargs: None)
    seams.check_engine(PolicyWorker)


def test_a_difference_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_free_blocks", more)
    with pytest.raises(RuntimeError) as error:
        seams.check_engine(PolicyWorker)
    assert str(error.value).count("_free_blocks is") == 1, "two schedulers of ours replace it"


def schedule(self: Any, throttle_prefills: bool = False, more: int = 0) -> None: ...
def touch(self: Any, blocks: Any, more: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "now"),
    [(Scheduler, "schedule", schedule), (BlockPool, "touch", touch)],
)
def test_an_option_that_is_passed_on_or_need_not_be_given_may_be_tried(
    owner: type,
    name: str,
    now: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(owner, name, now)
    monkeypatch.delenv(seams.OVERRIDE_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=f"{name} is"):
        seams.check_engine(PolicyWorker)
    monkeypatch.setenv(seams.OVERRIDE_VARIABLE, "1")
    # vLLM's loggers do not propagate.
    logger = logging.getLogger("vllm.kvx")
    # Engines of other tests may have left it silent.
    caplog.set_level(logging.WARNING, logger.name)
    monkeypatch.setattr(logger, "disabled", False)
    logger.addHandler(caplog.handler)
    try:
        seams.check_engine(PolicyWorker)
    finally:
        logger.removeHandler(caplog.handler)
    assert f".{name} is (self, " in caplog.text and "more=..." in caplog.text


def test_a_worker_compares_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_free_blocks", more)
    worker = object.__new__(PolicyWorker)  # It has no configuration yet to load a model by.
    with pytest.raises(RuntimeError, match="_free_blocks is"):
        worker.load_model()


def test_a_release_is_recorded_beside_the_others() -> None:
    table = {"m:C": {"f": {"(self)": ["0.1", "0.32", "0.33"]}, "g": {"()": ["0.1"]}}}
    seam = seams.Seam("m:C", "f", "v.C.f", "(self, x)")
    gone = seams.Seam("m:C", "h", "v.C.h", None)
    assert recorded(table, [seam, gone], "0.33") == {
        "m:C": {"f": {"(self)": ["0.32"], "(self, x)": ["0.33"]}}
    }
