"""Run by kt_kernel.py in the interpreter with kt-kernel, torch and safetensors. Does not import kt_runtime.

    PYTHON kt_kernel_script.py QUESTION

QUESTION is JSON. The last line of stdout is the answer, also JSON. The working directory has model.safetensors, a
checkpoint of one layer, and inputs.safetensors; the script writes outputs.safetensors. It calls kt-kernel's classes as
kt-kernel's wrappers do (0.7.2: kt_kernel/utils/amx.py, kt_kernel/sft/amx.py), since the wrappers need a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

PREFIX = "model.layers.0.mlp.experts"
PARTS = ("gate", "up", "down")
# Format -> (tensor name of the weights, of the scales, bits of a code, group).
TENSORS = {
    "bf16": ("weight", None, 0, 0),
    "int8": ("weight", None, 0, 0),
    "fp8": ("weight", "weight_scale_inv", 8, 128),
    "int4": ("weight_packed", "weight_scale", 4, 32),
    "int4_g32": ("weight_packed", "weight_scale", 4, 32),
}
CHECKED_TOKENS = 4
ROW_UNIT = 32  # the largest batch is rounded up to a multiple


def describe():
    import kt_kernel

    moe = kt_kernel.kt_kernel_ext.moe
    classes = [name for name in dir(moe) if name.endswith("_MOE")]
    return {"version": kt_kernel.__version__, "variant": kt_kernel.__cpu_variant__, "classes": classes}


class Layer:
    """One class of kt-kernel with its weights."""

    def __init__(self, question):
        import torch
        from kt_kernel import kt_kernel_ext
        from safetensors.torch import load_file

        self.question = question
        self.inputs = load_file("inputs.safetensors")
        pool = kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [question["threads"]]
        self.cpu = kt_kernel_ext.CPUInfer(pool)
        self.experts_map = torch.arange(question["experts"], dtype=torch.int64)
        self.kept = []  # kt-kernel keeps addresses, not tensors
        is_training = question["do"] == "forward_backward"
        config = self.training_config(kt_kernel_ext) if is_training else self.forward_config(kt_kernel_ext)
        config.pool = self.cpu.backend_
        self.give_weights(config)
        self.moe = getattr(kt_kernel_ext.moe, question["class"])(config)
        self.submit(self.moe.load_weights_task() if is_training else self.load_forward())

    def load_forward(self):
        return self.moe.load_weights_task(self.experts_map.data_ptr())

    def submit(self, task):
        self.cpu.submit(task)
        self.cpu.sync()

    def sizes(self):
        return [self.question[name] for name in ("experts", "top_k", "hidden", "intermediate")]

    def most_tokens(self):
        most = max(int(tokens) for tokens in self.question["tokens"])
        return -(-most // ROW_UNIT) * ROW_UNIT

    def forward_config(self, ext):
        config = ext.moe.MOEConfig(*self.sizes(), 0)
        config.max_len = self.most_tokens()
        return config

    def training_config(self, ext):
        config = ext.moe.MOESFTConfig()
        config.expert_num, config.num_experts_per_tok, config.hidden_size, config.intermediate_size = self.sizes()
        config.lora_rank = self.question["rank"]
        config.lora_alpha = self.question["scaling"] * self.question["rank"]
        config.lora_dropout = 0.0
        config.max_cache_depth = 1
        config.max_len = self.most_tokens()
        config.physical_to_logical_map = self.experts_map.data_ptr()
        for index, part in enumerate(PARTS):
            setattr(config, f"{part}_lora_a", self.inputs[f"lora.{2 * index}"].data_ptr())
            setattr(config, f"{part}_lora_b", self.inputs[f"lora.{2 * index + 1}"].data_ptr())
        return config

    def give_weights(self, config):
        from safetensors.torch import load_file

        self.loaded = load_file("model.safetensors")
        kind, is_training = self.question["format"], self.question["do"] == "forward_backward"
        weight, scale, bits, group = TENSORS[kind]
        if bits:
            config.quant_config.bits, config.quant_config.group_size = bits, group
            config.quant_config.zero_point = False
        # kt-kernel takes one tensor for all experts where it quantizes, and in training classes other than fp8.
        give = self.give_stacked if kind == "int8" or (is_training and kind != "fp8") else self.give_one_by_one
        for part in PARTS:
            give(config, f"{part}_proj", part, weight)
            give(config, f"{part}_scale", part, scale)

    def give_stacked(self, config, target, part, name):
        import torch

        if name is not None:
            self.kept.append(torch.stack(self.tensors(part, name)))
            setattr(config, target, self.kept[-1].data_ptr())

    def give_one_by_one(self, config, target, part, name):
        """Sets addresses by memory node and expert; 0 if the format has no such tensor."""
        experts = self.question["experts"]
        pointers = [0] * experts if name is None else [tensor.data_ptr() for tensor in self.tensors(part, name)]
        setattr(config, target + "s", [pointers])

    def tensors(self, part, name):
        return [self.loaded[f"{PREFIX}.{e}.{part}_proj.{name}"] for e in range(self.question["experts"])]

    def forward_call(self, tokens, index):
        """(a function that runs one forward, its output)."""
        import torch

        x, ids, weights = (self.inputs[f"{tokens}.{index}.{name}"] for name in ("x", "ids", "weights"))
        out, count = torch.zeros_like(x), torch.tensor([x.shape[0]], dtype=torch.int32)
        top_k = self.question["top_k"]

        def run():
            pointers = [t.data_ptr() for t in (ids, weights, x, out)]
            self.submit(self.moe.forward_task(count.data_ptr(), top_k, *pointers, False))

        return run, out

    def training_call(self, tokens, index):
        import torch

        x, ids, weights, grad = (self.inputs[f"{tokens}.{index}.{n}"] for n in ("x", "ids", "weights", "grad_out"))
        out, grad_x, grad_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
        count = torch.tensor([x.shape[0]], dtype=torch.int32)
        lora = [torch.zeros_like(self.inputs[f"lora.{i}"]) for i in range(6)]
        top_k = self.question["top_k"]

        def run():
            pointers = [t.data_ptr() for t in (ids, weights, x, out)]
            self.submit(self.moe.forward_sft_task(count.data_ptr(), top_k, *pointers, True))
            pointers = [t.data_ptr() for t in (grad, grad_x, *lora, grad_weights)]
            self.submit(self.moe.backward_task(*pointers, 0, 0, 0))

        return run, out


def measure(question):
    from safetensors.torch import save_file

    layer = Layer(question)
    cases, outputs = [], {}
    for tokens, num_batches in question["tokens"].items():
        make = layer.training_call if question["do"] == "forward_backward" else layer.forward_call
        calls = [make(tokens, index) for index in range(num_batches)]
        taken = timed([run for run, _ in calls], question["runs"], question["seconds"])
        cases.append({"tokens": int(tokens), "ms": 1e3 * min(taken), "ms_median": 1e3 * median(taken)})
        calls[0][0]()
        outputs[tokens] = calls[0][1][:CHECKED_TOKENS].clone()
    if question["do"] == "forward":
        save_file(outputs, "outputs.safetensors")
    return {"cases": cases}


def timed(calls, runs, seconds):
    """Seconds of each counted call, by the same rule as timing.py."""
    first = seconds_of(calls[0])
    taken = [] if first < seconds else [first]
    while not taken or (sum(taken) < 5 * seconds and (len(taken) < runs or sum(taken) < seconds)):
        taken.append(seconds_of(calls[(len(taken) + 1) % len(calls)]))
    return taken


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def forget_own_directory():
    """Removes this file's directory from sys.path: its kt_kernel.py would hide the package kt_kernel."""
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]


def main():
    forget_own_directory()
    question = json.loads(sys.argv[1])
    try:
        answer = describe() if question["do"] == "describe" else measure(question)
    except Exception as error:  # noqa: BLE001 (any error of kt-kernel is an answer: its problem)
        answer = {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
