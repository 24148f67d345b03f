"""One request that comes from disk, followed through every process by its spans, and by those for a collector."""

import json
from functools import partial
from pathlib import Path

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.harness import PATIENT, forget_gpu, running_stack, tokens
from tests.fakes.otlp_collector import Collector, over_grpc

PREFIX = tokens(1, 320)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
PROMISED = {
    "daemon": {"acquire", "ledger", "write", "fsync", "pack", "make pages", "read", "decode", "promotion"},
    "engine": {"step", "answer", "wait for promotion", "load"},
    "worker": {"copy in", "copy out"},
}


def test_every_stage_of_a_hit_from_disk_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    variable = {"KVTIER_TRACE_FOLDER": str(folder)}
    collector = Collector()
    with over_grpc(collector) as endpoint:
        options = EngineOptions(
            model=str(cached_model("tiny", TINY)),
            connector_config=PATIENT | {"otlp_endpoint": endpoint},
            extra_args=("--otlp-traces-endpoint", endpoint),
            extra_env=variable,
        )
        with running_stack(options, daemon_settings=variable) as stack, stack.engine() as engine:
            stack.wait_attached(engine)
            stack.pin("prefix", PREFIX, engine)
            stack.wait_durable("prefix")
            stack.cli("evict", "prefix", "--tier", "host")
            forget_gpu(engine)
            before = engine.cached_by_source()["disk"]
            body = {"model": "model", "prompt": [*PREFIX, 20, 21], "max_tokens": 8}
            traced = engine.http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT}, timeout=110)
            traced.raise_for_status()
            assert engine.cached_by_source()["disk"] - before == len(PREFIX)
            wait_until(lambda: "kvtier.load" in collector.spans("kvtier-connector"), 60, "the last span to be exported")
            spans = collector.spans("kvtier-connector")
            for process, last in (("worker", "copy in"), ("engine", "load")):  # vLLM may kill them
                path = next(folder.glob(f"{process}-*"))
                wait_until(partial(_is_written, path, last), 60, f"the {process} to write its spans")
    assert spans.keys() == {"kvtier.lookup", "kvtier.promotion_wait", "kvtier.load"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    said = {each.key: each.value for each in spans["kvtier.load"].attributes}
    assert said["gen_ai.usage.cache_read.input_tokens"].int_value == len(PREFIX)
    assert said["kvtier.source_tier"].string_value == "disk"
    rows = json.loads(stack.cli("trace", str(folder), "--json").stdout)
    for process, stages in PROMISED.items():
        seen = {row["stage"] for row in rows if row["process"].startswith(f"{process} ")}
        assert seen == stages, process
    merged = tmp_path / "all.json"
    print("\n" + stack.cli("trace", str(folder), "--merge", str(merged)).stdout)
    events = json.loads(merged.read_text())["traceEvents"]
    began, ended = (next(each for each in events if (each["name"], each["ph"]) == ("load", ph)) for ph in "be")
    copy = next(each for each in events if each["name"] == "copy in")
    assert began["ts"] <= copy["ts"] <= copy["ts"] + copy["dur"] <= ended["ts"], "one clock for all"


def _is_written(path: Path, span: str) -> bool:
    return f'"name":"{span}"' in path.read_text()
