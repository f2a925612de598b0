"""llama.cpp as a peer, in a process of its own: S prompts of one length, each a sequence of one batch, greedy.

    python benchmarks/peers/llama_cpp_streams.py MODEL.gguf     (needs llama-cpp-python and numpy, nothing else)

The first line of its input is JSON: prompts (S lists of ids), response (tokens of each), threads, cache ("f32", "f16"
or "bf16"), ubatch (prompt tokens of one forward). It answers with a line that says what it is. Each further line is a
turn, answered with JSON: prompt (seconds until every sequence has its first token), decode (seconds for all others),
tokens.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as llama
import numpy as np

_BF16 = 30  # ggml's number of the type, which llama_cpp does not name
CACHE_TYPES = {"f32": llama.GGML_TYPE_F32, "f16": llama.GGML_TYPE_F16, "bf16": _BF16}


class Streams:
    """One context with a cache for all sequences, flash attention on, emptied before each turn."""

    def __init__(self, path: str, prompts: list[list[int]], response: int, threads: int, cache: str,
                 ubatch: int) -> None:
        self.prompts, self.response = prompts, response
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        settings = llama.llama_context_default_params()
        settings.n_seq_max = len(prompts)
        settings.n_ctx = len(prompts) * (max(map(len, prompts)) + response)
        settings.n_batch = sum(map(len, prompts))
        settings.n_ubatch = ubatch
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = 1
        settings.type_k = settings.type_v = CACHE_TYPES[cache]
        self.context = llama.llama_init_from_model(self.model, settings)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context with these settings")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(settings.n_batch, 0, 1)

    def turn(self) -> dict:
        """All sequences from their prompts to their ends."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
        start = time.perf_counter()
        self._put([(token, place, s, place == len(prompt) - 1)
                   for s, prompt in enumerate(self.prompts) for place, token in enumerate(prompt)])
        drawn = [self._forward()]
        first = time.perf_counter()
        for i in range(1, self.response):
            self._put([(token, len(prompt) + i - 1, s, True)
                       for s, (prompt, token) in enumerate(zip(self.prompts, drawn[-1], strict=True))])
            drawn.append(self._forward())
        end = time.perf_counter()
        return {"prompt": first - start, "decode": end - first, "tokens": [list(t) for t in zip(*drawn, strict=True)]}

    def _put(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """The batch of the next forward: (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence

    def _forward(self) -> list[int]:
        """Run the batch; the likeliest next token of each sequence, in their order."""
        if llama.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")
        logits = ctypes.cast(llama.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (len(self.prompts), self.vocabulary)).argmax(1).tolist()


def main() -> None:
    quiet = llama.llama_log_callback(lambda *_: None)  # kept for as long as the library may call it
    llama.llama_log_set(quiet, None)
    streams = Streams(sys.argv[1], **json.loads(sys.stdin.readline()))
    print(f"llama-cpp-python {llama.__version__}, {llama.llama_print_system_info().decode()}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(streams.turn()), flush=True)


if __name__ == "__main__":
    main()
