"""Stock vLLM and KV policies side by side: same shape, same prompts, one run, one JSON.

python -m benchmarks.engine.compare --model llama-3.1-8b --engines stock speed-24 \\
    --cases ttft:32768 tpot:130000 pool_decode:128000 ttft:32768@full --out results.json

See benchmarks/README.md. A new policy needs no code here: name it under --engines.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line, gpu
from benchmarks.common.files import ROOT, write_json
from benchmarks.common.names import STOCK, baseline_of, file_name, split_name
from benchmarks.engine import composed
from benchmarks.engine.ideal import Case, case_ratio
from benchmarks.engine.plot import table
from benchmarks.engine.shapes import SHAPES, as_routed
from vllm_kvx.policy.cache_dtype import cache_options, dtype_in
from vllm_kvx.tools.doctor.weights import quantized_bytes
from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import Bytes, entry_bytes_of, mean_bytes, pool_ratio

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine.compare", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(SHAPES)} (dummy weights), or a checkpoint")
    add("--engines", nargs="+", help=f"{STOCK}, policies such as speed-24; @fp8: with such a cache")
    add("--preset", choices=composed.PRESETS, help="engines and cases of one composition")
    add("--cases", nargs="*", default=[], help="ttft:N tpot:N pool_decode:N decode:BxN, @policy")
    add("--out", type=Path, help="results file; default: that of --append")
    add("--append", type=Path, help="results to add to, made with the same model and settings")
    add("--resume", action="store_true", help="leave out what --append has without an error")
    add("--repeats", type=int, default=0, help="per length; default 5, and 3 beyond 64K")
    add("--tokens", type=int, default=129, help="output tokens of tpot cases")
    add("--steps", type=int, default=64, help="steps of decode cases")
    add("--seed", type=int, default=0)
    add("--time-limit", type=float, help="seconds, after which the engine is stopped")
    add("--starts", action="store_true", help="start each twice: with empty caches, and with them")
    add("--layout", nargs="+", default=[], help="policies that servers with one make room for, too")
    add("--disable", nargs="+", default=[], help="parts that servers with a policy turn off")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--dtype", default="bfloat16", choices=_DTYPE_BYTES)
    add("--max-model-len", type=int, help="default: the model's, at most 131072")
    add("--max-num-batched-tokens", type=int, default=8192, help="prefill chunk")
    add("--enforce-eager", action="store_true")
    add("--engine-args", type=json.loads, default={}, help="JSON: further arguments of vllm.LLM")
    args = parser.parse_args(argv)
    if args.preset:
        preset = composed.PRESETS[args.preset]
        args.engines = args.engines or preset["engines"]
        args.cases = args.cases or preset["cases"]
        args.engine_args = {**preset["engine_args"], **args.engine_args}
        args.layout = args.layout or preset.get("layout", [])
    args.out = args.out or args.append
    if args.out is None:
        parser.error("give --out or --append")
    if not args.engines:
        parser.error("give --engines or --preset")
    if args.resume and not args.append:
        parser.error("--resume goes with --append")
    if args.tokens < 2 or args.steps < 2:
        parser.error("--tokens and --steps must be at least 2")
    try:
        args.cases = [Case.parse(text) for text in args.cases]
        for name in args.engines:
            split_name(name)
    except ValueError as error:
        parser.error(str(error))
    return args


def prepare_model(model: str, folder: Path) -> tuple[Shape, dict[str, Any]]:
    """The shape, and the engine options that load it: a written config.json or a checkpoint."""
    if model not in SHAPES:
        config = Path(model) / "config.json"
        if not config.is_file():
            raise SystemExit(f"no {config}; --model is a checkpoint or one of {', '.join(SHAPES)}")
        return Shape.from_config(json.loads(config.read_text())), {"model": model}
    (folder / "config.json").write_text(json.dumps(SHAPES[model].config(), indent=1))
    return SHAPES[model], {"model": str(folder), "load_format": "dummy"}


def stored_weights(model: str) -> dict[str, float]:
    """`weight_bytes`, those of a weight, where a checkpoint has quantized ones."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return {"weight_bytes": quantized_bytes(config)} if config.get("quantization_config") else {}


def engine_options(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """What every engine of this run is started with."""
    return {
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": args.max_model_len or min(131072, shape.max_position),
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_seqs": 64,
        "enforce_eager": args.enforce_eager,
        "seed": args.seed,
        **args.engine_args,
    }


def cases_of(engine: str, cases: list[Case]) -> list[str]:
    """An engine's cases: stock knows no policies, and runs each measurement once."""
    stock = split_name(engine)[0] is None
    names = [str(case.stock if stock else case) for case in cases]
    return list(dict.fromkeys(names))


def caches_in(folder: str) -> dict[str, str]:
    """Variables by which all that a start compiles is kept in `folder`."""
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    return {name: f"{folder}/{name.lower()}" for name in names}


def run_engine(
    spec: dict[str, Any],
    log: Path,
    on_report: Any,
    deadline: float | None,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """Runs one engine in its own process and hands on its report whenever that changes."""
    report_path, spec_path = Path(spec["report"]), Path(spec["report"]).with_suffix(".spec.json")
    write_json(spec_path, spec)
    environment = {**os.environ, **variables}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    report: dict[str, Any] = {"status": "starting", "cases": {}}
    seen, stopped = "", False
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.measure", str(spec_path)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
        try:
            ended = False
            while not ended:
                ended = process.poll() is not None
                text = report_path.read_text() if report_path.exists() else ""
                if text != seen:
                    seen, report = text, json.loads(text)
                    on_report(report)
                    # It would take seconds to end by itself, and leaves nothing more.
                    ended |= report["status"] == "done"
                if deadline is not None and time.monotonic() > deadline and not ended:
                    stopped = True
                    break
                time.sleep(0.2)
        finally:
            # vLLM's own processes are of the same group; none may keep device memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if report["status"] not in ("done", "failed"):
        where = f"in {report['status']}"
        why = "stopped by --time-limit" if stopped else f"exit status {process.returncode}"
        report["error"] = [f"{why} {where}"]
    missing = [name for name in spec["cases"] if name not in report["cases"]]
    report["cases"].update({name: {"error": ["not run"]} for name in missing})
    failed = report.get("error") or any("error" in case for case in report["cases"].values())
    if failed:
        lines = [line[:300] for line in log.read_text(errors="replace").splitlines() if line]
        # The cause is in an engine core's traceback, far above the end.
        report["log_tail"] = [line for line in lines if "Error: " in line][-8:] + lines[-8:]
    return report


def derive(results: dict[str, Any], shape: Shape) -> None:
    """Adds ratio to stock, ideal and fraction of ideal to all that was measured.

    Where only stock over another cache was, `stock@fp8`, it is that one: see `baseline_of`.
    """
    shape = as_routed(shape, results.get("model", {}))
    settings = results["settings"]["engine"]
    model_bytes: float = _DTYPE_BYTES[settings["dtype"]]
    is_fp8 = str(settings.get("quantization", "")).startswith("fp8")
    weight_bytes = results.get("model", {}).get("weight_bytes", 1 if is_fp8 else model_bytes)
    of_all = dtype_in(settings)
    baseline = baseline_of(results["engines"]) or STOCK
    stock = results["engines"].get(baseline, {})
    stock_bytes = cache_bytes(split_name(baseline)[1] or of_all, shape, model_bytes)
    for name, engine in results["engines"].items():
        policy, dtype = split_name(name)
        kv_bytes = cache_bytes(dtype or of_all, shape, model_bytes)
        pool, stock_pool = engine.get("pool"), stock.get("pool")
        if pool and stock_pool:
            ratio, ideal = pool["tokens"] / stock_pool["tokens"], pool_ratio(shape, policy)
            if not stock_bytes or not kv_bytes:
                ideal = None
            elif ideal is not None:
                ideal *= mean_bytes(stock_bytes) / mean_bytes(kv_bytes)
            pool.update(against(ratio, ideal))
        for text, result in engine.get("cases", {}).items():
            case = Case.parse(text)
            base = stock.get("cases", {}).get(str(case.stock), {})
            if "median" not in result or "median" not in base:
                continue
            key = "tokens_per_s" if "tokens_per_s" in result else "median"
            ratio = result[key] / base[key] if key != "median" else base[key] / result[key]
            steps = results["settings"]["tokens" if case.kind == "tpot" else "steps"]
            ideal = None
            if kv_bytes and stock_bytes:
                ideal = case_ratio(
                    shape,
                    case,
                    case.policy or policy,
                    batch=result.get("batch", 1),
                    stock_batch=base.get("batch", 1),
                    stock_kv_bytes=stock_bytes,
                    generated=steps / 2,
                    weight_bytes=weight_bytes,
                    kv_bytes=kv_bytes,
                )
            result.update(against(ratio, ideal))


def cache_bytes(name: str | None, shape: Shape, model_bytes: float) -> Bytes | None:
    """Of a cached value; None where it is not known, or layers skip the cache beside windows."""
    found = entry_bytes_of(name, shape.layers, model_bytes, shape.head_dim)
    return None if isinstance(found, tuple) and shape.full_layers < shape.layers else found


def against(ratio: float, ideal: float | None) -> dict[str, float | None]:
    """Larger is better in every ratio."""
    return {
        "ratio_to_stock": round(ratio, 4),
        "ideal": round(ideal, 4) if ideal else None,
        "fraction_of_ideal": round(ratio / ideal, 4) if ideal else None,
    }


def what_of(model: str, dummy: bool) -> str:
    """The head's sentence."""
    weights = " with random weights" if dummy else ""
    return f"Speed of policies beside stock vLLM on {Path(model).name}{weights}."


class Results:
    """The results file; rewritten on every change, so that a killed run keeps what it measured."""

    def __init__(self, args: argparse.Namespace, argv: list[str], shape: Shape, dummy: bool):
        self.began = time.monotonic()
        self.path: Path = args.out
        self.shape = shape
        info = {"name": args.model, "dummy_weights": dummy, **shape.as_dict()}
        info |= stored_weights(args.model)
        settings = {key: getattr(args, key) for key in ("tokens", "steps", "seed")}
        settings["engine"] = engine_options(args, shape)
        command = command_line("benchmarks.engine.compare", argv)
        head = about(what_of(args.model, dummy), command, args.commit)
        self.content: dict[str, Any] = {"about": head, "model": info, "settings": settings}
        self.content.update(runs=[], engines={})
        machine = gpu()
        if args.append and args.append.exists():
            self.content = json.loads(args.append.read_text())
            if self.content["model"] != info or self.content["settings"] != settings:
                raise SystemExit(f"{args.append} has another model or other settings")
            if any(run["gpu"] != machine for run in self.content["runs"]):
                raise SystemExit(f"{args.append} was measured on another GPU or driver")
        # A file's head is that of its last run.
        self.content["about"] = {**head, "what": self.content["about"]["what"]}
        self.content["runs"].append(
            {**{key: head[key] for key in ("command", "date", "commit")}, "gpu": machine}
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def missing(self, name: str, cases: list[str]) -> list[str]:
        """The cases of an engine that are not there, or failed."""
        there = self.content["engines"].get(name, {})
        measured = there.get("cases", {})
        return [case for case in cases if "median" not in measured.get(case, {})]

    def measure(
        self,
        name: str,
        options: dict[str, Any],
        deadline: float | None,
        starts: bool,
        layout: Sequence[str] = (),
    ) -> bool:
        """Runs an engine and adds what it reports; whether all went well.

        starts: it is started before, with empty caches, which it then finds filled.
        layout: policies that requests may name besides, if the engine has one.
        """
        settings = self.content["settings"]
        earlier = self.content["engines"].get(name, {}).get("cases", {})
        policy, dtype = split_name(name)
        shown: set[str] = set()

        def on_report(report: dict[str, Any]) -> None:
            entry = {**report, "run": len(self.content["runs"]) - 1}
            if policy and layout:
                entry["room_for"] = list(layout)
            entry["cases"] = {**earlier, **report["cases"]}
            self.content["engines"][name] = entry
            derive(self.content, self.shape)
            write_json(self.path, self.content)
            done = [case for case in report["cases"] if case not in shown]
            shown.update(done)
            values = [f"{case} {report['cases'][case].get('median', 'ERROR')}" for case in done]
            line = "; ".join([*values, report["status"]])
            print(f"[{time.monotonic() - self.began:6.1f}s] {name}: {line}", flush=True)

        own = cache_options(dtype) if dtype else {}
        spec = {
            "policy": policy,
            "layout": layout,
            "vocab": self.shape.vocab,
            **settings,
            **options,
            "engine": {**settings["engine"], **options["engine"], **own},
        }
        log = self.path.with_name(f"{self.path.stem}.{file_name(name)}.log")
        if not starts:
            report = run_engine(spec, log, on_report, deadline, {})
            on_report(report)
            return "log_tail" not in report
        with tempfile.TemporaryDirectory() as folder:
            caches = caches_in(folder)
            cold = run_engine({**spec, "cases": []}, log, lambda _: None, deadline, caches)
            Path(spec["report"]).unlink(missing_ok=True)
            report = run_engine(spec, log, on_report, deadline, caches)
        report["starts"] = {"cold_s": cold.get("start_s"), "warm_s": report.get("start_s")}
        on_report(report)
        return "log_tail" not in {**cold, **report}


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    deadline = time.monotonic() + args.time_limit if args.time_limit else None
    # Ending by a signal must end the engine too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        shape, model = prepare_model(args.model, Path(folder))
        results = Results(args, argv, shape, dummy="load_format" in model)
        well = True
        for index, name in enumerate(args.engines):
            report = f"{folder}/engine{index}.json"
            options = {"engine": model, "report": report, "repeats": args.repeats}
            options["disable"] = args.disable
            options["cases"] = cases_of(name, args.cases)
            if args.resume:
                options["cases"] = results.missing(name, options["cases"])
                if not options["cases"]:
                    print(f"{name}: measured before", flush=True)
                    continue
            well &= results.measure(name, options, deadline, args.starts, args.layout)
    print(table(results.content))
    print(composed.table(results.content))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
