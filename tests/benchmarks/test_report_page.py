"""The generated page: it is what the files give, and says what was not measured."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.result_files import about, compared, evaluated, loaded, searched, tuned

from benchmarks.common.files import kind_of
from benchmarks.report import page as report
from benchmarks.report import readme, tables
from benchmarks.report.files import File, kept_of, read, same_method
from vllm_kvx.tools.tasks.table import GROUPS

NO_TABLE = f"# A project\n\n{readme.BEGIN}\n{readme.END}\n\nMore.\n"


def test_the_page_is_what_the_files_give() -> None:
    """If this fails, run python -m benchmarks.report."""
    assert report.main(["--check"]) == 0


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes result files and the page of them; returns the page."""

    def made(**files: Any) -> str:
        results = tmp_path / "results"
        results.mkdir(exist_ok=True)
        for name, content in files.items():
            (results / f"{name}.json").write_text(json.dumps(content))
        page = tmp_path / "docs" / "results" / "report.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "README.md").write_text(NO_TABLE)
        command = ["--results", str(results), "--page", str(page)]
        command += ["--readme", str(tmp_path / "README.md")]
        assert report.main([*command]) == 0
        assert report.main([*command, "--check"]) == 0
        return page.read_text()

    return made


def row(page: str, *parts: str) -> str:
    """The one line of the page that has all these parts."""
    (line,) = [line for line in page.splitlines() if all(part in line for part in parts)]
    return line


def test_servers_under_load_are_held_against_stock(write: Any) -> None:
    page = write(load=loaded({"stock": 2.0, "speed-16": 3.0, "snapkv": 1.0}))
    line = row(page, "`speed-16` | saturation")
    assert "| 3.000 | 1.50x (" in line and "3,072" in line and "not measured / not measured" in line
    # The same again beside what others publish, in the measure that they use.
    assert "| 1.40x on NVIDIA B200 |" in row(page, "maximum throughput", "`speed-16`", "1.50x")
    assert "| 1.80x on NVIDIA B200 |" in row(page, "tokens/s per user", "`speed-16`", "1.50x")
    assert "0.500x" in row(page, "`snapkv`", "requests/s, 8K/1K, saturation", "0.500x")
    assert "not measured" in row(page, "| all | saturation, 56 prompts")
    assert [page.count(f"{name}-8k-1k") for name in ("load", "waits")] == [1, 1]
    narrow = loaded({"stock": 2.0, "fier-2048": 3.0})
    in_bf16 = row(write(load=narrow), "`fier-2048` | saturation")
    narrow["settings"]["flags"] += ["--quantization", "fp8_per_tensor"]
    assert row(write(load=narrow), "`fier-2048` | saturation") != in_bf16
    # Others publish figures of one model.
    narrow["model"]["name"] = "another"
    assert "what others publish" not in write(load=narrow)
    one_rate = loaded({"stock": 2.0, "speed-16": 3.0}) | {"note": "Stock ran on another host."}
    for server in one_rate["servers"].values():
        del server["settings"]["4x8192/1024@2"]
    page = write(load=one_rate)
    assert "load.json): Stock ran on another host." in page
    assert [page.count(f"{name}-8k-1k") for name in ("load", "waits")] == [1, 0]
    assert "ttft-nvidia" not in page


def test_answers_name_weights_cutoff_and_model(write: Any) -> None:
    load = loaded({"stock": 2.0, "speed-24": 3.0, "fier-2048": 2.5})
    asked = {"fier-512": 0.9, "fier-64": 0.5}
    untuned = {"by_cutoff": evaluated({"speed-15": 0.4}), "diagnosis": {"layers": 20}}
    page = write(
        load=load,
        asked=evaluated(asked),
        tuned=tuned(15, 0.7),
        a={"about": about(), "small": untuned},
    )
    # On the shape that has speeds: what was asked that is nearest, and that it was another.
    line = row(page, "| `speed-24` |", "n 40")
    assert "70.0 [60-80], n 40: `speed-15` of 20 layers, small, tuned on 3.0M tokens" in line
    assert "40.0 [30-50], n 40: `speed-15` of 20 layers, small, not tuned" in line
    other = "not measured; another budget: 90.0 [80-100], n 40: `fier-512`, small"
    assert other in row(page, "| `fier-2048` |", "n 40")
    # In the table of answers: one row each, and those that the README recommends.
    assert "| small | not tuned | 40.0 [30-50] | 40 |" in row(page, "| `speed-15` of", "not tuned")
    assert "| tuned on 3.0M tokens | 70.0 [60-80] | 40 |" in row(page, "| `speed-15` of", "| tuned")
    assert "| small | as they are | 90.0 [80-100] | 40 |" in row(page, "| `fier-512` |")
    assert "| `fier-64` |" not in page


def test_answers_over_another_cache_are_others(write: Any) -> None:
    load = loaded({"stock": 2.0, "stock@fp8": 3.0, "fier-512": 2.5, "fier-512@fp8": 3.0})
    page = write(load=load, asked=evaluated({"fier-512": 0.9, "full@fp8": 0.2, "snapkv@fp8": 0.1}))
    assert "20.0 [10-30], n 40: `full@fp8`, small" in row(page, "| `stock@fp8` |", "n 40")
    assert "90.0 [80-100], n 40: `fier-512`" in row(page, "| `fier-512` |", "n 40")
    assert row(page, "| `fier-512@fp8` | 1.50x").endswith("| not measured |")
    # Of what has no speed there, nothing is told.
    assert "snapkv@fp8" not in page
    over = evaluated({"fier-512": 0.9}, resolved={"full": "full@fp8"})
    assert "90.0 [80-100]" not in write(load=load, asked=over)


def test_gains_over_stock_with_another_cache_stand_in_their_own_table(write: Any) -> None:
    medians = {"stock@fp8": {"ttft:32768": 2.0}, "fastkv@fp8": {"ttft:32768": 1.0}}
    page = write(longest=compared(medians))
    assert "| policy | case | stock@fp8 |" in page
    assert "2.000x" in row(page, "| `fastkv@fp8` | TTFT, 32,768 | 2.00 ms | 1.00 ms |")
    # Above, gains are over stock.
    assert page.count("`fastkv@fp8`") == 2 and "2.00x (" not in page


def test_gains_stand_beside_answers_of_the_same_setting_alone(write: Any, tmp_path: Path) -> None:
    model = {"model": "qwen2.5-coder-1.5b"}  # Of 28 layers; the shape's are 32.
    asked = {"fastkv:tsp_layer=13": 0.6, "fastkv:tsp_layer=16": 0.7, "snapkv:kv_rate=0.1": 0.8}
    asked |= {"snapkv:kv_rate=0.4": 0.9, "snapkv": 0.5, "fier-64": 0.3}
    files = ["ruler_niah_multikey_3-4096", "longbench_multifieldqa_zh"]
    first = write(
        gains=compared(
            {
                "stock": {"ttft:32768": 8.0},
                "fastkv:tsp_layer=15": {"ttft:32768": 4.0},
                "fastkv:tsp_layer=24": {"ttft:32768": 6.0},
                "snapkv": {"ttft:32768": 16.0},
            }
        ),
        a=evaluated(asked, tasks=list(GROUPS["generated"]), **model),
        b=evaluated(dict.fromkeys(list(asked)[:4], 0.2), tasks=files, **model),
    )
    # In the report's first tables, too; the nearest layer is named where none is the same.
    line = row(first, "| `fastkv:tsp_layer=15` |", "n 40")
    answers = r"\| 20.0 \[10-30\], n 40 \S+ to {} \[\S+\], n 40 \S+, on 2 task sets: "
    answers += "`fastkv:tsp_layer={}`"
    assert re.search(answers.format(60.0, 13), line) and "tsp_layer=16" not in line
    other = answers.format(70.0, 16).replace("20.0", "not measured; another layer: 20.0")
    assert re.search(other, row(first, "| `fastkv:tsp_layer=24` |", "n 40"))
    page = (tmp_path / "docs" / "results" / "answers-and-gains.md").read_text()
    line = row(page, "| `fastkv:tsp_layer=13` |")
    assert "60.0 [50-70], n 40" in line and "20.0 [10-30], n 40" in line and "| 2.00x, H200" in line
    # At another share of the depth, or another rate, it is another setting.
    for name in ("fastkv:tsp_layer=16", "snapkv:kv_rate=0.4"):
        assert "x, H200" not in row(page, f"| `{name}` |") and f"- `{name}`: all" in page
    # Two names of one policy are one row; what has one set and no gain has none.
    assert "| 0.50x, H200" in row(page, "| `snapkv", "x, H200")
    assert "fier-64" not in page


def test_what_one_gpu_serves_within_limits(write: Any, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results" / "what-one-gpu-serves.md"
    said = "The highest rate within limits of TTFT and TPOT: "
    assert f"{said}not measured yet" in write() and not page.exists()
    file = searched(
        {
            "stock": {"0.8": 1.0, "0.9": 0.7},
            "snapkv:kv_rate=0.2": {"1.2": 0.9, "1.3": 0.5},
            "speed-24": {"1": 1.0},
            "fier-64": {"1": 0.2},
            "stock@fp8": {},
        }
    )
    # A setting of other lengths, that ended without an answer; another server's has none.
    over = {"error": ["not done after 90 s"], "within": {"held": False}, "run": 0}
    file["servers"]["stock"]["settings"]["16x32768/4096@0.1"] = over
    asked = {"snapkv:kv_rate=0.2": 0.8, "snapkv:kv_rate=0.1": 0.5}
    generated = {"tasks": list(GROUPS["generated"]), "model": "qwen2.5-coder-1.5b"}
    half = evaluated({"fier-64": 0.5}, tasks=["other"])
    report = write(rates=file, a=evaluated(asked, **generated), b=tuned(15, 0.7), c=half)
    assert f"{said}[what one GPU serves](what-one-gpu-serves.md)" in report
    # Rates that were only tried are no loads of the report.
    assert "`snapkv:kv_rate=0.2` | 1.2 requests/s" not in report
    text = page.read_text()
    assert "## 8K/1K on one NVIDIA H200: llama-3.1-8b, 2026-01-01" in text
    assert "90% of the requests: TTFT of 2 s and mean TPOT of 30 ms at most." in text
    short, long = (part.split("## ")[0] for part in text.split("on one NVIDIA H200")[1:])
    assert "| `stock` | 0.8 |  | 1.50 | 21.0 | 0.9 | TTFT 30%, TPOT 0% |  |" in short
    line = row(short, "| `snapkv:kv_rate=0.2` | 1.2 | 1.50x |")
    assert "| generated: 80.0 [70-90], n 40, no floor" in line and "50.0" not in line
    # 15 of 20 layers are 24 of 32. Rates that are not known on both sides have no ratio.
    line = row(short, "| `speed-24` | 1 or more | not measured |")
    assert "tuned: 70.0 [60-80], n 40" in line and "small, cut at 15 of 20 layers" in line
    line = row(short, "| `fier-64` | less than 1 | not m")
    assert "TTFT 80%, TPOT 0% | not measured |" in line
    # Where no rate is held, what the lowest one tried has.
    assert "| (1.50) | (21.0) | 1 |" in line
    assert "| not measured | not measured |" in row(short, "| `stock@fp8` |")
    assert "| less than 0.1 |" in long and "| stopped: not done after 90 s |" in long
    assert "| not measured |" in row(long, "| `speed-24` |")
    # Of two files of a load the one with the longer runs goes first, and headings say how long.
    longer = searched({"stock": {"0.95": 1.0}})
    longer["settings"]["within"]["seconds"] = 600.0
    write(rates=file, longer=longer)
    heads = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert [head.rpartition(", ")[2] for head in heads if "8K/1K" in head] == [
        "prompts for 600 s",
        "prompts for 65 s",
    ]
    assert "prompts for" not in next(head for head in heads if "32K/4K" in head)
    for name in ("rates", "longer"):
        (tmp_path / "results" / f"{name}.json").unlink()
    write()
    assert not page.exists()


def test_answers_are_of_retrieval_at_every_length() -> None:
    names = {
        "fier-64:dense_below=0": "fier-64",
        "fier-64:dense_below=0,dense_layers=0": "fier-64:dense_layers=0",
        "fier-64:group=64,dense_below=0,dense_layers=0": "fier-64:group=64,dense_layers=0",
        "fier-64:dense_below=0+speed-4": "fier-64+speed-4",
        "fier-64:dense_below=1024": "fier-64:dense_below=1024",
    }
    file = File(1, "a.json", "evaluate", evaluated(dict.fromkeys(names, 0.5)))
    assert [each.policy for each in kept_of([file])] == list(names.values())


def test_a_model_asked_more_in_all_goes_first(write: Any, tmp_path: Path) -> None:
    asked = {"snapkv:kv_rate=0.1": 0.5}
    once = evaluated(asked, tasks=["c"], model="once")
    for cell in once["cells"]:
        cell["n"] = 60
    load = loaded({"stock": 2.0, "snapkv": 3.0})
    files = {name: evaluated(asked, tasks=[name]) for name in "ab"}
    line = row(write(load=load, once=once, **files), "| `snapkv` |", "n 40")
    assert "small" in line and "once" not in line
    assert "; small |" in row((tmp_path / "README.md").read_text(), "snapkv:kv_rate=0.1")


def test_of_equal_cutoffs_the_youngest_file_and_its_first_stand(write: Any) -> None:
    def at(hour: int, share: float) -> dict[str, Any]:
        made = tuned(15, share)
        made["about"]["date"] = f"2026-11-23T{hour:02}:00:00+00:00"
        return made

    young = at(15, 0.7)
    young["cutoffs"]["longer-15"] = tuned(15, 0.8)["cutoffs"]["15"]
    load = loaded({"stock": 2.0, "speed-24": 3.0})
    page = write(load=load, a=young, b=at(9, 0.6))
    line = row(page, "| `speed-24` |", "n 40")
    assert "70.0 [60-80]" in line and "60.0" not in line and "80.0 [" not in line


def test_starts_are_held_against_stock() -> None:
    engines = {
        "stock": {"starts": {"cold_s": 80.0, "warm_s": 40.0}},
        "speed-24": {"starts": {"cold_s": 100.0, "warm_s": None}},
        "snapkv": {},
    }
    file = File(3, "starts.json", "compare", {"engines": engines})
    _, _, stock, speed = tables.starts([file])
    link = "[3](../../benchmarks/results/starts.json) |"
    assert stock == f"| `stock` | 80 s | 1.00x | 40 s | 1.00x | {link}"
    assert speed == f"| `speed-24` | 100 s | 1.25x | not measured |  | {link}"


def test_nothing_measured_is_said_and_not_drawn(write: Any) -> None:
    page = write(cpu=loaded({"stock": 2.0, "speed-16": 3.0}, gpu=None), other={"what": "x"})
    assert "speed-16" not in page and "publish" not in page and "![" not in page
    assert "Not read, measured without a GPU: `cpu.json`." in page
    assert "Not read, no figures of a policy" in page and "`other.json`" in page
    assert row(page, "| all | saturation, 256 prompts").count("not measured") == 1


def test_a_changed_figure_is_noticed(write: Any, tmp_path: Path) -> None:
    write(load=loaded({"stock": 2.0, "speed-16": 3.0}))
    page, results = tmp_path / "docs" / "results" / "report.md", tmp_path / "results"
    check = ["--results", str(results), "--page", str(page), "--check"]
    check += ["--readme", str(tmp_path / "README.md")]
    kept = page.read_text()
    page.write_text(kept.replace("1.50x", "1.60x"))
    assert report.main(check) == 1
    page.write_text(kept)
    plot = next((tmp_path / "docs" / "results" / "report").glob("*.png"))
    shutil.copy(plot, plot.with_name("old.png"))
    assert report.main(check) == 1
    plot.with_name("old.png").unlink()
    assert report.main(check) == 0
    (results / "load.json").write_text(json.dumps(loaded({"stock": 2.0, "speed-16": 3.1})))
    assert report.main(check) == 1


def test_the_same_method_on_another_model() -> None:
    assert same_method("fastkv:tsp_layer=15") == same_method("fastkv:tsp_layer=16,kv_rate=0.1")
    assert same_method("fastkv") != same_method("fastkv:kv_rate=0.2")
    critical = same_method("snapkv:kv_rate=0.2,score=critical,after=32")
    assert critical == same_method("criticalkv:kv_rate=0.2,after=32")
    assert same_method("fier-512:dense_below=0") == "fier-512"
    # Answers over a narrow cache are others.
    assert same_method("fier-512:dense_below=0@fp8") == "fier-512@fp8"
    assert same_method("stock@fp8") == same_method("full@fp8") == "full@fp8"
    assert same_method("structkv:pivot=online") != same_method("structkv:pivot=15") == "structkv"
    assert same_method("fastkv:tsp_layer=15+fier-512") == "fastkv+fier-512"


def test_kinds_of_files() -> None:
    assert kind_of(loaded({})) == "serving" and kind_of(searched({})) == "within"
    assert kind_of({"model": {}, "settings": {}, "runs": [], "engines": {}}) == "compare"
    assert kind_of({"cells": [], "model": "m", "tasks": []}) == "evaluate"
    assert kind_of({"what": "x"}) is kind_of([]) is None


def policies(text: str) -> dict[str, list[str]]:
    """The cells of README.md's table, by policy, without their links."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| [`")]
    return {
        row[0].split("`")[1]: [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell) for cell in row[1:]]
        for row in rows
    }


def test_the_readme_has_gains_beside_answers(write: Any, tmp_path: Path) -> None:
    medians = {"ttft:130000": 3.0, "tpot:130000": 2.0}
    alone = compared({"stock": medians, "speed-24": {"ttft:130000": 2.0, "tpot:130000": 1.0}})
    older = tuned(15, 0.7)
    older["cutoffs"]["15"]["report"]["cells"][1]["n"] = 99
    full_depth = tuned(15, 0.9)
    full_depth["cutoffs"]["15"]["record"]["training"]["at_full_depth"] = 0.5
    write(
        alone=alone,
        load=loaded({"stock": 2.0, "speed-24": 3.0}),
        other=loaded({"stock": 2.0, "fier-2048": 5.0}, gpu="NVIDIA H100 80GB HBM3, 1"),
        asked=evaluated({"snapkv:kv_rate=0.2,after=32": 0.8}),
        a=tuned(15, 0.6),
        b=older,
        c=full_depth,
        further=tuned(14, 1.0),
    )
    readme_text = (tmp_path / "README.md").read_text()
    rows = policies(readme_text)
    _, *gains, answers = rows["speed-24"]
    assert gains == ["1.50x", "2.00x", "1.50x"]
    # Both runs at the nearest cut, that with most questions first; none with other batches.
    both = "60.0% (50-70, n 40) to 70.0% (60-80, n 99) in 2 runs"
    assert answers == f"{both}; small, 20 layers, cut at 15"
    assert rows["fier-2048"][1:] == [*["not measured"] * 2, "2.50x on an H100", "not measured"]
    assert rows["snapkv:kv_rate=0.2,after=32"][1:] == [
        *["not measured"] * 3,
        "80.0% (70-90, n 40); small",
    ]
    assert "on one H200, unless a cell names another GPU" in readme_text
    # Every figure leads to its file.
    said = re.findall(r"\]\(benchmarks/results/(.*?)\.json\)", readme_text)
    assert set(said) == {"alone", "load", "other", "asked", "a", "b"}
    assert "[2.50x](benchmarks/results/other.json) on an H100" in readme_text
    # A dot where both are known.
    (plot,) = readme.plots(read(tmp_path / "results")[0])
    assert plot.rows == (("speed-24 tuned", 1.5, 70.0, 60.0, 80.0),)


def test_a_layer_is_the_nearest_in_share_of_the_layers(write: Any, tmp_path: Path) -> None:
    asked = evaluated({"fastkv:tsp_layer=16": 0.9, "fastkv:tsp_layer=13": 0.6})
    asked["model"] = "qwen2.5-coder-1.5b"
    write(load=loaded({"stock": 2.0}), asked=asked)
    cells = policies((tmp_path / "README.md").read_text())["fastkv:tsp_layer=15,kv_rate=0.1"]
    assert cells[-1] == "60.0% (50-70, n 40); qwen2.5-coder-1.5b, layer 13 of 28"


def test_the_readme_keeps_what_is_not_the_table(write: Any, tmp_path: Path, capsys: Any) -> None:
    write(load=loaded({"stock": 2.0, "speed-24": 3.0}))
    path = tmp_path / "README.md"
    text = path.read_text()
    assert text.startswith(f"# A project\n\n{readme.BEGIN}\n\n| policy |")
    assert text.endswith(f"\n\n{readme.END}\n\nMore.\n")
    page = tmp_path / "docs" / "results" / "report.md"
    command = ["--results", str(tmp_path / "results"), "--page", str(page), "--readme", str(path)]
    path.write_text(text.replace("1.50x", "1.60x"))
    assert report.main([*command, "--check"]) == 1
    assert report.main(command) == 0 and path.read_text() == text
    path.write_text("# A project\n")
    assert report.main([*command, "--check"]) == 1 == report.main(command)
    assert "no place for a table" in capsys.readouterr().err
