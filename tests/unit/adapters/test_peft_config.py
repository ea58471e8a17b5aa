from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from kt_runtime.adapters.peft_config import make_config, parse_config
from kt_runtime.errors import AdapterError


def config(**changes: Any) -> bytes:
    plain = make_config(4, 8.0, ["q_proj"], "base") | changes
    return json.dumps({key: value for key, value in plain.items() if value is not ...}).encode()


def test_every_key_that_peft_writes_is_known() -> None:
    settings = parse_config(config(), 8, "file")
    assert (settings.rank, settings.alpha, settings.base_model, settings.is_plain) == (4, 8.0, "base", True)


@pytest.mark.parametrize(("alpha", "written"), [(8.0, 8), (5.5, 5.5)])
def test_whole_alphas_are_written_as_integers(alpha: float, written: float) -> None:
    assert repr(make_config(4, alpha, ["q_proj"], None)["lora_alpha"]) == repr(written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": ...}, "peft_type is None"),
        ({"r": 0}, r"r \(the rank\) is 0; expected an integer from 1 to 8"),
        ({"r": -5}, r"r \(the rank\) is -5"),
        ({"r": 9}, r"r \(the rank\) is 9, above this server's largest, 8"),
        ({"r": 4.5}, r"r \(the rank\) is 4.5"),
        ({"r": True}, r"r \(the rank\) is True"),
        ({"r": ...}, "'r' is missing"),
        ({"lora_alpha": ...}, "'lora_alpha' is missing"),
        ({"lora_alpha": None}, "'lora_alpha' is missing"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": 1e308}, r"lora_alpha is 1e\+308; expected a number above 0, at most 3.40282e\+38"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000000"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"use_dora": True}, "use_dora is 'True': DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*lm_head"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is .*one pair per expert"),
        ({"target_parameters": ["mlp.gate_proj.weight", "experts.down_proj"]}, ".*'experts.down_proj' is no linear's"),
        ({"target_parameters": "mlp.gate_proj.weight"}, "target_parameters is .*expected a list of names"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"lora_rnak": 4}, "unknown key 'lora_rnak'"),
        ({"lora_dropouts": 0.1}, "unknown key 'lora_dropouts'.*did you mean 'lora_dropout'"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] .*is 0"),
        ({"rank_pattern": {"q_proj": 16}}, r"rank_pattern\['q_proj'\] .*is 16, above"),
        ({"alpha_pattern": {"q_proj": "x"}}, r"alpha_pattern\['q_proj'\] is 'x'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map"),
        ({"rank_pattern": {"(q_proj": 2}}, ".*no regular expression"),
        ({"rank_pattern": {"(a+)+b": 2}}, ".*too complex"),
        ({"alpha_pattern": {"x" * 300: 2}}, ".*too complex"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=rf"file: {message}"):
        parse_config(config(**changes), 8, "file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "file:1: invalid JSON"),
        (b'{"r": 4,\n "lora_alpha": }', "file:2: invalid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"\xff\xfe", "invalid JSON"),
        (b'{"r": 4, "lora_alpha": NaN}', "contains NaN"),
        (b'{"r": 4, "lora_alpha": Infinity}', "contains Infinity"),
        (b'{"r": ' + b"1" * 5000 + b"}", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        parse_config(data, 8, "file")


def test_an_unknown_key_that_is_switched_off_is_accepted() -> None:
    parse_config(config(use_something_new=False, other_config=None, more={}), 8, "file")


def test_ranks_and_scalings_follow_peft() -> None:
    patterns = {
        "rank_pattern": {"q_proj": 2, r"layers\.1\..*o_proj": 8},
        "alpha_pattern": {"^model.layers.0.x.o_proj": 3},
    }
    settings = parse_config(config(use_rslora=True, **patterns), 8, "file")
    names = (
        "model.layers.0.x.q_proj",
        "model.layers.1.x.o_proj",
        "model.layers.0.x.o_proj",
        "model.layers.0.x.kq_proj",
    )
    assert [settings.rank_of(name) for name in names] == [2, 8, 4, 4]
    assert [settings.scaling_of(name) for name in names] == [8 / math.sqrt(2), 8 / math.sqrt(8), 1.5, 4.0]


def test_patterns_that_are_accepted_match_in_reasonable_time() -> None:
    settings = parse_config(config(rank_pattern={".*a.*a.*ab": 2}), 8, "file")
    seconds = []
    for _ in range(3):  # the least: a collection of garbage takes as long
        start = time.process_time()
        for _ in range(20):
            settings.rank_of("a" * 100)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.18  # 18 ms measured; backtracking without bound takes hours
