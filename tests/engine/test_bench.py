"""The bench runs, compares like with like, and ends with the JSON line it promises. No timing is judged."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine.bench.__main__ import main
from engine.bench.peer_server import ServerPeer
from engine.bench.peer_transformers import load_peer, run_one_after_another, run_padded_batch
from engine.bench.workload import mixed_jobs
from engine.load.dense import dense_state_dict
from tests.engine.checkpoints import make_reference, save_quantized


def test_jobs_depend_on_the_seed_alone() -> None:
    jobs = mixed_jobs(20, seed=3, vocab_size=50, prompt_range=(2, 9), output_range=(1, 4))
    assert jobs == mixed_jobs(20, seed=3, vocab_size=50, prompt_range=(2, 9), output_range=(1, 4))
    assert jobs != mixed_jobs(20, seed=4, vocab_size=50, prompt_range=(2, 9), output_range=(1, 4))
    assert {len(job.prompt_ids) for job in jobs} <= set(range(2, 10))
    assert {job.num_output for job in jobs} == {1, 2, 3, 4}
    assert all(0 <= token < 50 for job in jobs for token in job.prompt_ids)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_dense_state_is_what_the_peer_computes(method: str, tmp_path: Path) -> None:
    expected = save_quantized(make_reference(seed=1), tmp_path, method, symmetric=False).state_dict()  # type: ignore[arg-type]
    dense = dense_state_dict(tmp_path)
    assert dense.keys() == expected.keys()
    for name, tensor in dense.items():
        assert torch.equal(tensor, expected[name].float()), name


def test_peers_agree_with_each_other(tmp_path: Path) -> None:
    """The padded batch answers what the jobs alone answer, so its speed is the speed of the same work."""
    save_quantized(make_reference(seed=1), tmp_path, "gptq")
    peer = load_peer(tmp_path)
    jobs = mixed_jobs(3, seed=0, vocab_size=200, prompt_range=(3, 9), output_range=(2, 6))
    alone, padded = run_one_after_another(peer, jobs), run_padded_batch(peer, jobs)
    assert alone.answers == padded.answers
    assert [len(answer) for answer in alone.answers] == [job.num_output for job in jobs]


@pytest.mark.slow
def test_last_line_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    save_quantized(make_reference(seed=1, max_position_embeddings=512), tmp_path / "m", "gptq")
    try:
        main(
            [
                *("--model", str(tmp_path / "m"), "--cpu-compute", "exact", "--repeats", "1", "--concurrency", "3"),
                *("--out", str(tmp_path / "out.json")),
            ]
        )
    finally:
        torch.set_num_threads(threads)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == (tmp_path / "out.json").read_text().strip()
    report = json.loads(last)
    assert {"cpu", "torch", "commit", "read_gb_per_s"} <= report["card"].keys()
    (result,) = report["results"]
    for section, peers in (("one", ["transformers"]), ("many", ["transformers", "transformers_padded"])):
        assert result[section]["ours"]["tokens_per_s"] > 0
        for peer in peers:
            assert result[section][peer]["same_tokens"] == 1.0
            assert result[section][peer]["ratio"] > 0


class _Completions(BaseHTTPRequestHandler):
    """Answers every completion with usage one token short of what was asked for."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        answer = json.dumps({"usage": {"completion_tokens": body["max_tokens"] - 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_counts_what_it_says_it_wrote() -> None:
    tier1 = Path(__file__).parents[2] / "backends" / "builtin" / "models" / "tier1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Completions)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        jobs = mixed_jobs(5, seed=0, vocab_size=256, prompt_range=(3, 9), output_range=(2, 6))
        run = ServerPeer(f"http://127.0.0.1:{server.server_port}", tier1).run(jobs)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert run.counts == [job.num_output - 1 for job in jobs]
    assert run.tokens_per_s == run.num_tokens / run.total_s
    assert {body["temperature"] for body in _Completions.bodies} == {0.0}
    assert all(body["prompt"] and body["logit_bias"] for body in _Completions.bodies)
    with pytest.raises(ValueError, match="file:"):
        ServerPeer("file:///etc/passwd", tier1)
