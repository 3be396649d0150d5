"""A stand-in for SGLang's server, which has no CPU build: its documented routes, and a
``transformers`` engine.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.ports import free_port
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.transformers import TransformersEngine

FIRST = "default"


class SGLangStub:
    """The server, in threads of this process.

    Attributes:
        port: that it listens on.
        label: of its weights.
        context: in tokens.
        vocabulary: ids that it takes.
        raw: whether it states log-probs of temperature 1.
        slow_s: seconds that each request for samples takes longer.
        aborts: how many requests for samples are answered with an abort first.
        foreign: how many requests for samples are answered as if others had updated the weights.
        lies: how many requests for samples are answered with a response too few.
        busy: how many requests for scores are refused as one too many.
        hangs: until it is set, requests for scores are not answered.
        seen: the bodies of all requests, by route.
        keys: what each request was authorized with.
        given: the weights of each version that it was given, by name.
        adapters: engines with adapters, by their name; None if it was started without LoRA.
        idle: whether it says that it loads adapters, and samples without them.

    Args:
        path: of the model.
    """

    def __init__(self, path: str) -> None:
        self.path, self.label, self.raw, self.slow_s = path, FIRST, False, 0.0
        self.aborts = self.foreign = self.lies = self.busy = 0
        self.hangs = threading.Event()
        self.hangs.set()
        self.seen: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.given: dict[int, dict[str, torch.Tensor]] = {}
        self.adapters: dict[str, TransformersEngine] | None = None
        self.idle = False
        self._one = threading.Lock()
        self.engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(path).float().eval())
        self.context, self.vocabulary = 2048, self.engine.model.config.vocab_size
        self.start(free_port())

    def start(self, port: int) -> None:
        """Listen; the weights are the first ones again if they were changed."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(
                    json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
                )

            def answer(self, body: Any) -> None:
                stub.seen.append((self.path, body))
                stub.keys.append(self.headers["authorization"])
                status, reply = stub.respond(self.path, body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads, allow_reuse_address, block_on_close = True, True, False

            def get_request(self) -> Any:
                connection, address = super().get_request()
                stub._connections.append(connection)
                return connection, address

        self._connections: list[Any] = []
        self._server = Server(("127.0.0.1", port), Handler)
        self.port = port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Stop listening at once, like a killed process."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Restart on the same port with the first weights."""
        self.engine.model.load_state_dict(
            AutoModelForCausalLM.from_pretrained(self.path).state_dict()
        )
        self.engine.update_weights(self.engine.model.named_parameters(), 0)
        self.label = FIRST
        self.start(self.port)

    def respond(self, route: str, body: Any) -> tuple[int, Any]:
        if route == "/get_model_info":
            return 200, {"model_path": self.path, "weight_version": self.label}
        if route == "/get_server_info":
            return 200, {"context_length": self.context, "max_total_num_tokens": 100_000}
        if route in ("/pause_generation", "/continue_generation"):
            return 200, {"status": "ok"}
        if route == "/update_weights_from_disk":
            weights = load_file(Path(body["model_path"]) / "model.safetensors")
            with self._one:
                self.engine.update_weights(
                    ((k, v) for k, v in weights.items() if k != "lm_head.weight"), 0
                )
                self.label = body["weight_version"]
                self.given[int(self.label.partition("-")[2])] = weights
            return 200, {"success": True, "message": "done"}
        if route == "/load_lora_adapter" and self.adapters is not None:
            base = copy.deepcopy(self.engine.model)
            model = base if self.idle else PeftModel.from_pretrained(base, body["lora_path"])
            self.adapters[body["lora_name"]] = TransformersEngine(model.eval())
            return 200, {"success": True, "loaded_adapters": {}}
        if route == "/unload_lora_adapter" and self.adapters is not None:
            del self.adapters[body["lora_name"]]
            return 200, {"success": True, "loaded_adapters": {}}
        if route == "/generate":
            engine = self.engine
            if name := body.get("lora_path"):
                if name not in (self.adapters or {}):
                    return 400, {"error": {"message": f"{name} was not loaded"}}
                engine = self.adapters[name]
            return self._generate(body, engine)
        return 404, {"error": "no such route"}

    def _generate(self, body: Any, engine: TransformersEngine) -> tuple[int, Any]:
        time.sleep(self.slow_s)
        prompt, options = body["input_ids"], body["sampling_params"]
        if max(prompt) >= self.vocabulary:
            return 400, {"error": {"message": "out of vocabulary"}}
        temperature = options["temperature"]
        if "logprob_start_len" in body:
            return self._score(prompt, body["logprob_start_len"], body["top_logprobs_num"])
        if "top_logprobs_num" in body:
            with torch.no_grad():
                known = torch.tensor([prompt]).clamp(max=self.engine.model.config.vocab_size - 1)
                logits = engine.model(known).logits[0, -1]
            log_probs = (logits / (1.0 if self.raw else temperature)).log_softmax(-1)
            best = log_probs.topk(body["top_logprobs_num"])
            top = [
                [x, i, None]
                for x, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
            return 200, {
                "meta_info": {"output_token_logprobs": top[:1], "output_top_logprobs": [top]}
            }
        params = SamplingParams(
            options["max_new_tokens"],
            temperature=temperature,
            stop_token_ids=tuple(options["stop_token_ids"]),
        )
        with self._one:
            [completions] = engine.generate([torch.tensor(prompt)], options["n"], params)
            label = "others-1" if self.foreign > 0 else self.label
        reason = "abort" if self.aborts > 0 else ""
        self.aborts -= 1
        self.foreign -= 1
        self.lies -= 1
        answers = [
            {
                "meta_info": {
                    "output_token_logprobs": [
                        [x, i, None]
                        for x, i in zip(
                            completion.log_probs.tolist(), completion.tokens.tolist(), strict=True
                        )
                    ],
                    "finish_reason": {"type": reason or completion.finish_reason},
                    "weight_version": label,
                }
            }
            for completion in completions
        ]
        if self.lies >= 0:
            answers.pop()
        return 200, answers if options["n"] > 1 else answers[0]

    def _score(self, prompt: list[int], start: int, top_k: int) -> tuple[int, Any]:
        self.hangs.wait()
        self.busy -= 1
        if self.busy >= 0:
            return 429, {"error": {"message": "too many requests"}}
        with torch.no_grad():
            known = torch.tensor([prompt]).clamp(max=self.engine.model.config.vocab_size - 1)
            logits = self.engine.model(known).logits[0, start:-1]
        log_probs = logits if self.raw else logits.log_softmax(-1)
        ids = zip(known[0, start + 1 :], prompt[start + 1 :], strict=True)
        own = [
            [row[token].item(), token_id, None]
            for row, (token, token_id) in zip(log_probs, ids, strict=True)
        ]
        likely = [
            [
                [x, i, None]
                for x, i in zip(*(part.tolist() for part in row.topk(top_k)), strict=True)
            ]
            for row in log_probs
        ]
        info: dict[str, Any] = {"input_token_logprobs": [[None, prompt[start], None], *own]}
        if top_k:
            info["input_top_logprobs"] = [None, *likely]
        return 200, {"meta_info": info}
