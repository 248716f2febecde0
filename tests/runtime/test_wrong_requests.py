"""Requests that cannot be served: the argument is named, and what was required."""

import numpy as np
import pytest
from scripted_text import PLAIN, PROMPT

from dsc.bundle_schema.errors import ConfigError, GenerationError, RequestError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: at least 1 is required, got 0"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens: a whole number is required, got 2\.5"),
        ({"max_new_tokens": NAN}, "max_new_tokens: a whole number is required, got nan"),
        ({"max_new_tokens": "3"}, "max_new_tokens: a whole number is required, got '3'"),
        ({"max_new_tokens": True}, "max_new_tokens: a whole number is required, got True"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature: .*got -1"),
        ({"sampling": {"temperature": NAN}}, "sampling.temperature: .*got nan"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k: .*got -1"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p: .*got 0"),
        ({"sampling": {"heat": 1}}, "sampling.heat: "),
        ({"sampling": {1: 2}}, "sampling.1: "),
        ({"sampling": "greedy"}, "sampling: SamplingParams or a mapping .*got 'greedy'"),
        ({"sampling": {"logit_bias": {99: 1.0}}}, "token ids below 13 are required, got 99"),
        ({"sampling": {"logit_bias": {1: INF}}}, "sampling.logit_bias.1: .*got inf"),
        ({"sampling": {"logit_bias": {1: 1e39}}}, "sampling.logit_bias.1: "),
        ({"sampling": {"repetition_penalty": 1e-40}}, "sampling.repetition_penalty: "),
        ({"sampling": {"temperature": True}}, "sampling.temperature: a number is required, got True"),
        ({"sampling": {"temperature": "0.5"}}, "sampling.temperature: a number is required, got '0.5'"),
        ({"sampling": {"top_k": True}}, "sampling.top_k: a number is required, got True"),
        ({"sampling": {"logit_bias": 5}}, "sampling.logit_bias: "),
        ({"seed": True}, "sampling.seed: a number is required, got True"),
        ({"seed": 2**64}, "sampling.seed: "),
        ({"seed": -1}, "sampling.seed: .*got -1"),
        ({"seed": "x"}, "sampling.seed: .*got 'x'"),
        ({"speculation": "fast"}, "speculation: 'auto', 'off' or options are required, got 'fast'"),
        ({"speculation": None}, "speculation: .*got None"),
        ({"speculation": np.zeros(3)}, "speculation: .*got array"),
        ({"speculation": {"window": 17}}, "speculation.window: "),
        ({"speculation": {"window": NAN}}, "speculation.window: "),
        ({"speculation": {"window": True}}, "speculation.window: a number is required, got True"),
        ({"speculation": {"window": "4"}}, "speculation.window: a number is required, got '4'"),
        ({"speculation": {"window": 33}}, "speculation.window: "),
        ({"speculation": {"max_window": 0}}, "speculation.max_window: "),
        ({"speculation": {"fallback": "no"}}, "speculation.fallback: .*got 'no'"),
        ({"speculation": {"window": 4, "max_window": 2}}, "speculation: window or max_window is required"),
        ({"speculation": {"wndow": 4}}, "speculation.wndow: "),
        ({"speculation": {1: 4}}, "speculation.1: "),
        ({"speculation": {"proposer": "eagle3"}}, "one of ngram, self is required, got 'eagle3'"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"stop": [5]}, "stop: texts are required, got 5 .stop_tokens takes ids"),
        ({"stop": None}, "stop: a text or a sequence of texts is required, got None"),
        ({"stop": [""]}, "stop: texts of at least one character are required"),
        ({"stop_tokens": 5}, "stop_tokens: a sequence of token ids is required, got 5"),
        ({"stop_tokens": [1.5]}, r"stop_tokens token 0: a whole number is required, got 1\.5"),
        ({"stop_tokens": [10**30]}, "stop_tokens: ids below 13 are required, got 1000"),
        ({"ignore_eos": "no"}, "ignore_eos: True or False is required, got 'no'"),
        ({"reuse_cache": 1}, "reuse_cache: True or False is required, got 1"),
        ({"trace": 7}, "trace: a path or a text file is required, got 7"),
        ({"processors": print}, "processors: a sequence of functions is required, got <built-in"),
        ({"processors": [5]}, "processors: functions are required, got 5"),
    ],
)
def test_a_wrong_argument_is_named(model, options, message):
    with pytest.raises(RequestError, match=message):
        model.stream(PROMPT, **options)
    with pytest.raises(RequestError, match=message), model.engine(background=False) as engine:
        engine.submit(PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: at least one token"),
        ([1, 13], "prompt token 1: an id below 13 is required, got 13"),
        ([-1], "prompt token 0"),
        ([10**30], "prompt token 0"),
        ([1, 1.5], r"prompt token 1: a whole number is required, got 1\.5"),
        ([1, NAN], "prompt token 1: a whole number is required, got nan"),
        (["1"], "prompt token 0: a whole number is required, got '1'"),
        (np.array([[1, 2]]), "prompt token 0: a whole number is required, got array"),
        (None, "prompt: a sequence of token ids is required, got None"),
        (b"ab", "prompt: a sequence of token ids is required, got b'ab'"),
        ({"role": "user", "content": "x"}, "prompt: messages come in a list"),
        ([{"role": "user", "content": "x"}, 3], "prompt message 1: a mapping with a role is required, got 3"),
        ([{"content": "x"}], "prompt message 0: a mapping with a role"),
    ],
)
def test_a_wrong_prompt_is_named(model, prompt, message):
    with pytest.raises((GenerationError, RequestError), match=message):
        model.generate(prompt)
    assert list(model.generate(PROMPT, 5).ids) == PLAIN[:5]


def test_as_many_tokens_as_fit_are_made_of_more(model):
    assert model.generate(PROMPT, 10**30).ids == model.generate(PROMPT).ids


@pytest.mark.parametrize("changes", [None, 5, "windows.max", [("windows.max", 6)], {1: 2}, {None: 1}])
def test_changes_of_the_schedule_are_a_mapping_of_paths(model, changes):
    version = model.scheduler.live.version
    with pytest.raises(ConfigError, match="changes: a mapping of dotted paths to values is required"):
        model.update_config(changes)
    assert model.scheduler.live.version == version


@pytest.mark.parametrize("path", [None, 5, b"x"])
def test_continuations_are_kept_in_a_file(model, path):
    for call in (model.save_continuations, model.load_continuations):
        with pytest.raises(RequestError, match="path: a path is required"):
            call(path)


@pytest.mark.parametrize("turns", [1, -1, 1.5, NAN, "1", True, None])
def test_turns_are_counted(model, turns):
    with pytest.raises(RequestError, match="turns: "):
        model.conversation().rewind(turns)


@pytest.mark.parametrize("text", [None, 5, ["x"]])
def test_a_turn_is_a_text(model, text):
    with pytest.raises(RequestError, match="text: a text is required"):
        model.conversation().send(text)


@pytest.mark.parametrize("prompt", [np.array([3, 1, 4]), (3, 1, 4), (token for token in PROMPT), np.int32([3, 1, 4])])
def test_ids_come_in_any_sequence(model, prompt):
    assert list(model.generate(prompt, np.int64(5)).ids) == PLAIN[:5]


def test_text_without_a_tokenizer_is_refused(model):
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        model.generate("hello")
