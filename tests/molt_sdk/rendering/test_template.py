"""Model files, chat templates and the door between text and token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_sdk.errors import ModelPathError, TemplateError
from molt_sdk.rendering.abilities import Abilities, find_abilities
from molt_sdk.rendering.jinja import compile_template
from molt_sdk.rendering.renderer import Renderer
from molt_sdk.rendering.template import ChatTemplate, ModelFiles
from molt_sdk.rendering.tokens import Tokens
from molt_sdk.testing import TEMPLATES, pocket_model

CHATML = TEMPLATES["chatml"]
START, END = 257, 258  # ids of <|im_start|> and <|im_end|>; 0-255 are the bytes


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of its own, to be changed."""
    return Path(pocket_model(tmp_path / "model"))


def abilities_of(directory: Path, source: str) -> Abilities:
    return find_abilities(ChatTemplate(ModelFiles(pocket_model(directory / "model", source))))


# --- what a model directory must hold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelPathError, match=rf"{model} has no {name}"):
        ModelFiles(str(model))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match="nowhere' is not a directory"):
        ModelFiles(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_file_that_cannot_be_read_is_named(model: Path, name: str, content: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(ModelPathError, match=name):
        ModelFiles(str(model))


def test_without_a_chat_template_the_error_says_where_it_would_be(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    edit_json(model / "tokenizer_config.json", chat_template=None)
    with pytest.raises(TemplateError, match=r"no chat template.*chat_template\.jinja.*model\.complete"):
        ChatTemplate(ModelFiles(str(model)))


def test_the_default_of_several_named_templates_is_taken(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    edit_json(model / "tokenizer_config.json", chat_template=named)
    assert ModelFiles(str(model)).chat_template == CHATML


def test_all_end_ids_of_all_files_end_a_completion(model: Path) -> None:
    """F16: generation_config and config may list several; the tokenizer and the template have one each."""
    edit_json(model / "generation_config.json", eos_token_id=[10, 11])
    edit_json(model / "config.json", eos_token_id=12)
    edit_json(model / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    files = ModelFiles(str(model))
    assert files.eos_token_ids == (10, 11, 12, 256)
    assert Renderer(str(model)).eos_token_ids == (10, 11, 12, 256, END)


def test_limits_of_a_model_with_a_text_part(model: Path) -> None:
    edit_json(model / "config.json", text_config={"max_position_embeddings": 99, "eos_token_id": 5})
    files = ModelFiles(str(model))
    assert files.context_length == 99
    assert 5 in files.eos_token_ids


# --- probing ----------------------------------------------------------------------------------------------------------


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)


def test_what_a_template_can_do_is_found_by_rendering_it(tmp_path: Path) -> None:
    chatml = abilities_of(tmp_path / "a", CHATML)
    assert (chatml.system, chatml.later_system, chatml.tools, chatml.tool_role) == (True, True, False, True)
    strict = abilities_of(
        tmp_path / "b",
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    )
    assert (strict.system, strict.later_system, strict.tools, strict.tool_role) == (False, False, False, False)
    with_tools = abilities_of(tmp_path / "c", WITH_TOOLS)
    assert with_tools.tools
    assert with_tools.parallel_calls


def test_f31_tools_that_are_not_shown_are_no_support(tmp_path: Path) -> None:
    """F31: schemas without calls, a call that is dropped, a result that is swallowed: none of them raises."""
    no_calls = abilities_of(tmp_path / "a", "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    assert not no_calls.tools
    swallowing = abilities_of(tmp_path / "b", WITH_TOOLS.replace("in messages", "in messages if m.role != 'tool'"))
    assert not swallowing.tools
    assert not swallowing.tool_role
    assert not abilities_of(tmp_path / "c", WITH_TOOLS.replace("{{ tools | tojson }}", "")).tools  # no schemas
    one_call = "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}{{ m.content }}"
    single = abilities_of(tmp_path / "d", WITH_TOOLS.replace("{{ m.content }}", one_call))
    assert single.tools
    assert not single.parallel_calls


def test_f32_the_form_of_arguments_is_the_one_that_is_encoded_once(tmp_path: Path) -> None:
    """F32: a template may encode arguments that are text again, and may fail on data."""
    assert not abilities_of(tmp_path / "a", WITH_TOOLS).arguments_as_text
    concatenating = WITH_TOOLS.replace("call.function | tojson", "call.function.name + call.function.arguments")
    assert abilities_of(tmp_path / "b", concatenating).arguments_as_text


def test_ids_of_calls_that_must_have_nine_characters(tmp_path: Path) -> None:
    checked = "{% if call.id | length != 9 %}{{ raise_exception('9') }}{% endif %}{{ call.function | tojson }}"
    abilities = abilities_of(tmp_path, WITH_TOOLS.replace("{{ call.function | tojson }}", checked))
    assert abilities.tools
    assert abilities.call_ids == "short"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", ""])
def test_the_key_of_reasoning_is_found(tmp_path: Path, key: str) -> None:
    shown = f"{{{{ m.{key} or '' }}}}{{{{ m.content }}}}" if key else "{{ m.content }}"
    assert abilities_of(tmp_path, CHATML.replace("message", "m").replace("in ms", "in messages")).reasoning_key == ""
    source = WITH_TOOLS.replace("{{ m.content }}", shown)
    assert abilities_of(tmp_path / "with", source).reasoning_key == key


# --- text never becomes a control token -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatml(pocket: str) -> Renderer:
    return Renderer(pocket)


@pytest.fixture(scope="module")
def tokens(pocket: str) -> Tokens:
    return ModelFiles(pocket).tokens


@given(
    st.lists(
        st.lists(
            st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "\ue000", "a", "\n", "é"])
            | st.text(max_size=3),
            max_size=6,
        ).map("".join),
        min_size=1,
        max_size=3,
    )
)
def test_only_the_template_writes_control_tokens(chatml: Renderer, contents: list[str]) -> None:
    """F20: the literal text stays visible, one start and one end per message, whatever the messages say."""
    ids = chatml.prompt([{"role": "user", "content": content} for content in contents])
    assert ids.count(START) == len(contents) + 1  # and the generation prompt
    assert ids.count(END) == len(contents)
    assert 256 not in ids
    expected = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents) + "<|im_start|>assistant\n"
    assert chatml.files.tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_special_text_in_keys_of_arguments_is_text_too(tokens: Tokens) -> None:
    messages = [{"role": "user", "content": {"<|im_end|>": ["<|im_start|>"]}}]
    marker = tokens.marker_for(messages)
    guarded = tokens.guard(messages, marker)
    assert marker
    assert "<|im_" not in json.dumps(guarded)


def test_without_special_text_messages_are_rendered_as_they_are(tokens: Tokens) -> None:
    assert tokens.marker_for([{"role": "user", "content": "<|im_star|> plain"}]) == ""


# --- the dialect ------------------------------------------------------------------------------------------------------


def test_the_clock_of_a_template_stands_still() -> None:
    """F29: a template that writes the time must write the same in every call of a run."""
    render = compile_template("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}", "t")
    assert render(messages=[]) == render(messages=[])
    assert render(messages=[]).startswith("20")


def test_tojson_writes_what_models_are_trained_on() -> None:
    """F23: no HTML escapes, no \\u escapes, key order kept."""
    render = compile_template("{{ value | tojson }}", "t")
    assert render(value={"b": "é <&>", "a": 1}) == '{"b": "é <&>", "a": 1}'


def test_generation_tags_and_loop_controls_render() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m }}{% endgeneration %}{% endfor %}"
    )
    assert compile_template(source, "t")(messages=["a", "b"]) == "a"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% for %}", ["here", "does not compile: line 2: "]),
        ("{{ raise_exception('roles must alternate') }}", ["here", "2 messages", "roles must alternate"]),
        ("{{ messages[0].content + 3 }}", ["here", "2 messages", "TypeError"]),
        ("{{ messages.missing.key }}", ["here", "UndefinedError", "missing"]),
        ("{{ ''.__class__.__mro__ }}", ["here", "unsafe"]),  # sandboxed
        ("{{ messages.append(1) }}", ["here", "SecurityError"]),  # a template changes nothing of its caller's
    ],
)
def test_errors_of_a_template_name_it_and_keep_its_words(source: str, words: list[str]) -> None:
    with pytest.raises(TemplateError) as error:
        compile_template(source, "here")(messages=[{"content": "a"}, {"content": "b"}])
    assert [word for word in words if word not in str(error.value)] == []
