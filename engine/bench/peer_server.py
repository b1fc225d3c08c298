"""Runs any OpenAI-compatible server of the same checkpoint (llama.cpp's, say) under the bench's load, over HTTP."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.bench.load_pass import LoadPass
from engine.bench.workload import Job
from engine.load.source import load_config, resolve_checkpoint

TIMEOUT_S = 600


class ServerPeer:
    """Sends jobs to ``{url}/v1/completions``, all at once.

    Parameters
    ----------
    url : such as ``http://127.0.0.1:8081``; only http and https
    source : the checkpoint, whose tokenizer turns the jobs' tokens into the text that the server takes

    The server may tokenise that text into another number of tokens, and may end early if it ignores ``logit_bias``;
    the tokens it reports having written are the ones that count.
    """

    def __init__(self, url: str, source: str | Path) -> None:
        from tokenizers import Tokenizer

        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--server is {url!r}; expected an http or https URL.")
        self.url = url.rstrip("/") + "/v1/completions"
        self.tokenizer = Tokenizer.from_file(str(resolve_checkpoint(source) / "tokenizer.json"))
        # End-of-sequence is biased away, so that every contender writes as much.
        self.logit_bias = {str(i): -100 for i in load_config(source).eos_token_ids}

    def run(self, jobs: list[Job]) -> LoadPass:
        """Run all jobs concurrently, one connection each."""
        with ThreadPoolExecutor(len(jobs)) as pool:
            began_s = time.perf_counter()
            counts = list(pool.map(self._complete, jobs))
            return LoadPass(time.perf_counter() - began_s, counts)

    def _complete(self, job: Job) -> int:
        body = {
            "prompt": self.tokenizer.decode(job.prompt_ids, skip_special_tokens=False),
            "max_tokens": job.num_output,
            "temperature": 0.0,
            "logit_bias": self.logit_bias,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return int(json.load(response)["usage"]["completion_tokens"])
