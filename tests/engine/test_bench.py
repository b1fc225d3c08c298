"""The bench runs, compares like with like, and ends with the JSON line it promises. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.bench.__main__ import main
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
