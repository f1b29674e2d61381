"""Settings from defaults, files and the command line: precedence, origins, and complaints that name their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.config.load import PATHS, flatten, load_config, validate
from engine.core.config.setting_list import canonical_key
from engine.core.config.tree import AttentionConfig, CacheConfig, EngineConfig, OptionPlace, PluginsConfig
from engine.core.errors import ConfigError
from engine.core.executors import MessageDecoder, encode

WriteFile = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    def make(text: str, name: str = "engine.toml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return make


def test_without_anything_all_is_default() -> None:
    resolved = load_config()
    assert resolved.config == EngineConfig()
    assert set(resolved.origins.values()) == {"default"}
    assert set(resolved.origins) == set(flatten(EngineConfig()))


def test_the_command_line_goes_over_the_file_over_the_defaults(write: WriteFile) -> None:
    file = write("[scheduler]\nmax_running = 8\nmax_batch_tokens = 512\n")
    resolved = load_config(
        file,
        {"scheduler.max_running": "4"},
        {"scheduler.max_batch_tokens": (64, "default (x)"), "model.path": ("/demo", "default (demo)")},
    )
    assert resolved.config.scheduler.max_running == 4
    assert resolved.config.scheduler.max_batch_tokens == 512
    assert resolved.config.model.path == "/demo"
    assert resolved.origins["scheduler.max_running"] == "--max-running"
    assert resolved.origins["scheduler.max_batch_tokens"] == "engine.toml"
    assert resolved.origins["model.path"] == "default (demo)"
    assert resolved.origins["cache.block_size"] == "default"


def test_a_file_is_named_by_a_path_or_a_string(write: WriteFile) -> None:
    file = write("[scheduler]\nmax_running = 3\n")
    assert load_config(str(file)) == load_config(file)


def test_toml_and_yaml_say_the_same(write: WriteFile) -> None:
    toml = write(
        '[attention]\nname = "x"\n[attention.options]\nsplits = 4\nnested = {a = [1, 2]}\n[plugins]\ndeny = ["a"]\n'
    )
    yaml = write(
        "attention: {name: x, options: {splits: 4, nested: {a: [1, 2]}}}\nplugins:\n  deny: [a]\nserver:\n", "e.yaml"
    )
    assert load_config(toml).config == load_config(yaml).config
    assert load_config(toml).config.attention.options == {"splits": 4, "nested": {"a": [1, 2]}}


def test_a_single_string_is_a_list_of_one(write: WriteFile) -> None:
    assert load_config(write('[server]\napi_key = "a,b"\n')).config.server.api_key == ("a,b",)


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("scheduler.max_running", "64", 64),
        ("cache.prefix_caching", "off", False),
        ("cache.prefix_caching", "TRUE", True),
        ("cache.memory_fraction", "0.5", 0.5),
        ("cache.memory_fraction", 1, 1.0),
        ("plugins.deny", "a, b", ("a", "b")),
        ("plugins.deny", ["a", "b"], ("a", "b")),
        ("plugins.deny", "[a, b]", ("a", "b")),
        ("server.api_key", "a", ("a",)),
        ("server.api_key", "[]", ()),
        ("plugins.deny", "", ()),
        ("plugins.deny", '["a", "b"]', ("a", "b")),
        ("attention.options.n", "[a, 2]", ["a", 2]),
        ("model.served_name", "12", "12"),
        ("attention.options.n", "3", 3),
        ("attention.options.n", '"3"', "3"),
        ("attention.options.n", "true", True),
        ("attention.options.n", "[1, 2]", [1, 2]),
        ("attention.options.n", "plain text", "plain text"),
        ("attention.options.a.b", "1.5", 1.5),
        ('attention.options."a.b"', "x", "x"),
    ],
)
def test_the_command_line_is_read_by_the_type_of_the_setting(key: str, typed: object, value: object) -> None:
    found = flatten(load_config(None, {key: typed}).config)[key]
    assert found == value
    assert type(found) is type(value)


def test_a_value_may_come_with_its_origin() -> None:
    resolved = load_config(None, {"server.max_n": ("3", "--set"), "attention.options.a": ("1", "--attention-option")})
    assert resolved.origins["server.max_n"] == "--set"
    assert resolved.origins["attention.options.a"] == "--attention-option"


def test_options_of_the_file_and_the_command_line_are_merged(write: WriteFile) -> None:
    file = write('[quant.options]\na = 1\nb = 2\n[quant.options.layers]\n"model.layers.0" = "x"\n')
    resolved = load_config(file, {"quant.options.b": "3", "quant.options.c": "4"})
    assert resolved.config.quant.options == {"a": 1, "b": 3, "c": 4, "layers": {"model.layers.0": "x"}}
    assert resolved.origins["quant.options.a"] == "engine.toml"
    assert resolved.origins["quant.options.b"] == "--quant-option"
    assert resolved.origins['quant.options.layers."model.layers.0"'] == "engine.toml"


def test_the_place_of_each_option_is_kept_when_the_configuration_is_sent_to_another_process(write: WriteFile) -> None:
    file = write("[quant]\nname = 'x'\n[quant.options]\na = 1\nb = {c = 2, d = 3}\n")
    config = load_config(file, {"quant.options.b.d": "4", "attention.options.e": ("5", "--set")}).config
    of_file = OptionPlace(str(file), str(file.parent))
    assert config.option_places == {
        "quant.options.a": of_file,
        "quant.options.b.c": of_file,
        "quant.options.b.d": OptionPlace("--quant-option", os.getcwd()),
        "attention.options.e": OptionPlace("--set", os.getcwd()),
    }
    received = MessageDecoder[EngineConfig](EngineConfig).decode(encode(config))
    assert received == config
    assert received.option_places == config.option_places


def test_the_places_of_options_are_no_setting(write: WriteFile) -> None:
    with pytest.raises(ConfigError, match="there is no section 'option_places'"):
        load_config(write("[option_places]\na = 1\n"))


def test_an_option_replaces_a_table_of_options_and_the_reverse(write: WriteFile) -> None:
    file = write("[quant.options]\na = {x = 1}\nb = 2\n")
    resolved = load_config(file, {"quant.options.a": "3", "quant.options.b.y": "4"})
    assert resolved.config.quant.options == {"a": 3, "b": {"y": 4}}


def test_a_flattened_tree_can_be_loaded_again(write: WriteFile) -> None:
    file = write(
        '[quant.options]\n"a.b" = 1\nc = {d = ["x"]}\n[plugins]\nallow = ["p", "q"]\n[cache]\nmemory = "1GiB"\n'
    )
    config = load_config(file).config
    assert load_config(defaults={key: (value, "x") for key, value in flatten(config).items()}).config == config


def test_relative_paths_in_a_file_start_from_the_file(write: WriteFile, tmp_path: Path) -> None:
    file = write('[model]\npath = "ckpt"\ntokenizer = "/abs/tok"\nchat_template = "../t.jinja"\n')
    config = load_config(file).config
    assert config.model.path == str(tmp_path / "ckpt")
    assert config.model.tokenizer == "/abs/tok"
    assert Path(config.model.chat_template).resolve() == (tmp_path.parent / "t.jinja").resolve()
    assert load_config(file, {"model.path": "here"}).config.model.path == str(Path("here").absolute())


@pytest.mark.parametrize("key", PATHS)
def test_relative_paths_elsewhere_start_from_the_working_directory_of_the_process_that_loads_them(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = {"server.ssl_certfile": ("/cert.pem", "test")}  # by ssl_keyfile
    expected = "some/../file" if key == "server.uds" else str(tmp_path / "some/../file")
    for loaded in (
        load_config(overrides={key: "some/../file"}, defaults=needed),
        load_config(overrides={key: ("some/../file", "$ENGINE_SOMETHING")}, defaults=needed),
        load_config(defaults={**needed, key: ("some/../file", "a default")}),
    ):
        assert flatten(loaded.config)[key] == expected


def test_names_on_the_hub_and_empty_paths_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"model.path": "org/name", "model.tokenizer": "org/name", "speculator.model": "org/other"}
    config = load_config(overrides={**given, "model.chat_template": ""}).config
    assert (config.model.path, config.model.tokenizer) == ("org/name", "org/name")
    assert (config.speculator.model, config.model.chat_template) == ("org/other", "")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert load_config(overrides=given).config.model.path == str(tmp_path / "org" / "name")


def test_a_relative_path_of_an_option_starts_from_the_working_directory_of_the_process_that_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = load_config(overrides={"quant.options.a": "x"}, defaults={"quant.options.b": ("y", "default")})
    assert {one.directory for one in places.config.option_places.values()} == {str(tmp_path)}


def test_paths_in_a_file_stay_the_same_in_another_working_directory_when_the_file_is_named_by_a_relative_path(
    write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('[model]\npath = "ckpt"\n[server]\nuds = "socket"\n[quant.options]\na = 1\n')
    monkeypatch.chdir(tmp_path.parent)
    config = load_config(Path(tmp_path.name, "engine.toml")).config
    assert config.model.path == str(tmp_path / "ckpt")
    assert config.server.uds == str(tmp_path / "socket")
    assert config.option_places["quant.options.a"].directory == str(tmp_path)


@pytest.mark.parametrize("key", PATHS)
def test_tilde_is_the_home_of_the_user_wherever_a_path_is_given(
    key: str, write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    section, _, name = key.partition(".")
    needed = {"server.ssl_certfile": ("cert.pem", "test")}  # by ssl_keyfile
    file = write(f'[{section}]\n{name} = "~/some/where"\n')
    for loaded in (
        load_config(file, defaults=needed),
        load_config(overrides={key: "~/some/where"}, defaults=needed),
        load_config(overrides={key: ("~/some/where", "$ENGINE_SOMETHING")}, defaults=needed),
        load_config(defaults={**needed, key: ("~/some/where", "a default")}),
    ):
        assert flatten(loaded.config)[key] == "/home/someone/some/where"
    file = write(f'[{section}]\n{name} = "~"\n')
    assert flatten(load_config(file, defaults=needed).config)[key] == "/home/someone"
    file = write(f'[{section}]\n{name} = "./a~/b"\n')
    assert flatten(load_config(file, defaults=needed).config)[key] == str(tmp_path / "a~" / "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[scheduler]\nmax_runing = 3", r"engine.toml: \[scheduler\] max_runing: .*did you mean max_running\?"),
        ("[sheduler]\nname = 'x'", r"no section 'sheduler'; did you mean scheduler\?"),
        ("[scheduler]\npage_size = 8", r"did you mean \[cache\] block_size\?"),
        ("model = 'x'", "model is a section"),
        ("model = 0", "model is a section"),
        ("[sheduler]", r"no section 'sheduler'; did you mean scheduler\?"),
        ("[model]\nmax_len = 'many'", r"\[model\] max_len: expected a whole number, found \"many\" \(a string\)"),
        ("[model]\nmax_len = true", r"expected a whole number, found true"),
        ("[model]\nmax_len = 8.0", r"expected a whole number, found 8.0"),
        ("[model]\npath = 3", "expected a string, found 3"),
        ("[model.path]\nx = 3", "path: expected a string, found a table"),
        ("[cache]\nprefix_caching = 'yes'", 'expected true or false, found "yes"'),
        ("[cache]\nprefix_caching = 1", "expected true or false, found 1"),
        ("[cache]\nmemory_fraction = '0.5'", 'expected a number, found "0.5"'),
        ("[cache]\nmemory_fraction = nan", "expected a number, found nan"),
        ("[plugins]\nallow = 1", r"expected a list, written \[a, b\], found 1"),
        ("[plugins]\nallow = ['a', 3]", r"allow\[1\]: expected a string, found 3"),
        ("[attention]\noptions = 3", "expected a table of options, found 3"),
        ("[scheduler]\noverlap = 'onn'", "'onn' is no choice; did you mean on"),
        ("[scheduler]\nmax_running = -1", "-1 is out of range; give 0 to"),
        ("[model]\nmax_len = 1", r"engine.toml: \[model\] max_len: a context of 1 token .*; give at least 2"),
        ("[cache]\nblock_size = 24", r"engine.toml: \[cache\] block_size: 24 is no power of two; use 16"),
        ("[cache]\npage_size = 24", r"engine.toml: \[cache\] page_size: 24 is no power of two; use 16"),
        ("max_model_le = 24", r"engine.toml: .*no setting 'max_model_le'; did you mean max_model_len"),
        (
            "[scheduler]\nmax_running = 8\nmax_num_seqs = 8",
            r"engine.toml: \[scheduler\] max_num_seqs: max_num_seqs and max_running are one setting; give one of them",
        ),
        (
            "max_num_seqs = 8\n[scheduler]\nmax_num_seqs = 8",
            r"engine.toml: \[scheduler\] max_num_seqs: .*one setting",
        ),
        ("[cache\n", "engine.toml is not valid TOML: .*line 1"),
    ],
)
def test_a_wrong_file_is_refused_naming_place_and_fix(write: WriteFile, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: a, path: b}", "'path' is given twice"),
        ("- a\n- b", "expected sections"),
        ("model: [", "not valid YAML"),
        ("sheduler:", r"no section 'sheduler'"),
        ("? [a, b]\n: c", "YAML"),
        ("model: {max_len: }", "max_len: expected a whole number, found nothing"),
        ("cache: {prefix_caching: 'yes'}", "expected true or false"),
    ],
)
def test_a_wrong_yaml_file_is_refused(write: WriteFile, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(text, "engine.yml"))


@pytest.mark.parametrize(("text", "name"), [("[model]\nmax_len = 8", "engine.toml"), ("model: {max_len: 8}", "a.yml")])
def test_a_file_may_begin_with_a_byte_order_mark(write: WriteFile, text: str, name: str) -> None:
    assert load_config(write("\ufeff" + text, name)).config.model.max_len == 8


def test_an_empty_file_changes_nothing(write: WriteFile) -> None:
    assert (
        load_config(write("model:\nserver: {}\n", "a.yaml")).config
        == load_config(write("", "a.toml")).config
        == EngineConfig()
    )


def test_a_missing_file_and_an_unknown_format_are_refused(tmp_path: Path, write: WriteFile) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"neither \.toml nor \.yaml"):
        load_config(write("{}", "engine.json"))


def test_all_that_is_wrong_is_said_at_once_even_if_overridden(write: WriteFile) -> None:
    file = write("[scheduler]\nmax_running = 'x'\nmax_runing = 1\n[cache]\npage_size = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"scheduler.max_running": "4", "model.max_len": "y", "nothing.here": "1"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("--max-len: expected a whole number")
    assert lines[4].startswith("--set (nothing.here): there is no section 'nothing'")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cache.memory": "3GiX"}, "--kv-memory: '3GiX' is not a size"),
        ({"cache.memory": "1GiB", "cache.memory_fraction": "0.5"}, "--memory-fraction: cache.memory .* leave out one"),
        ({"server.api_key": "k l"}, "--api-key: a key is empty or has spaces"),
        ({"server.api_key": ""}, "--api-key: a key is empty or has spaces"),
        ({"server.api_key": "k, ,l"}, "--api-key: a key is empty or has spaces"),
        ({"server.admin_api_key": ""}, "--admin-api-key: a key is empty or has spaces"),
        ({"server.allowed_origins": "example.com"}, "--allowed-origins: 'example.com' is no origin"),
        ({"server.allowed_hosts": "http://a"}, "--allowed-hosts: 'http://a' is no name"),
        ({"server.host": ""}, "--host: the address is empty"),
        ({"server.uds": "a", "server.port": "1"}, "--uds: the server listens on either a path or host and port"),
        ({"server.ssl_keyfile": "a"}, "server.ssl_certfile: a private key without its certificate"),
        ({"scheduler.name": ""}, "--scheduler: the name is empty"),
        ({"model.seed": "1"}, "--weights-seed: it is the seed of dummy weights; give model.load_format dummy too"),
        (
            {"executor.max_graph_tokens": "2048", "executor.graphs": "off"},
            r"--max-graph-tokens: steps with prefill have no graphs \(executor.graphs is off\); leave out one",
        ),
        ({"cache.metrics_sample": "0.5"}, "--kv-metrics-sample: it has no effect without cache.metrics; give that"),
        ({"kv_events.topic": "a"}, "--kv-events-topic: it has no effect without kv_events.endpoint; give that too"),
        ({"kv_events.max_queue": "5"}, r"kv_events.max_queue.*: it has no effect without kv_events.endpoint"),
        (
            {"kv_events.endpoint": "tcp://127.0.0.1:5557", "kv_events.buffer_steps": "5"},
            r"kv_events.buffer_steps.*: it has no effect without kv_events.replay_endpoint",
        ),
        (
            {"server.profile_max_seconds": "5"},
            r"server.profile_max_seconds.*: it has no effect without server.profile_dir",
        ),
        ({"server.allow_credentials": "on"}, "--allow-credentials: it has no effect without server.allowed_origins"),
        ({"plugins.allow": "a", "plugins.deny": "a"}, "'a' is in allow and in deny"),
        ({"cache.prefix_caching": "maybe"}, '--prefix-caching: expected true or false, found "maybe"'),
        ({"scheduler.max_running": "1.5"}, '--max-running: expected a whole number, found "1.5"'),
        ({"server.port": "x"}, r"\(a string\); give a value like 8000, its default$"),
    ],
)
def test_impossible_values_are_refused_naming_the_flag(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_settings_are_accepted_with_the_one_that_they_need() -> None:
    overrides = {"cache.metrics": "on", "cache.metrics_sample": "0.5", "model.seed": "1", "model.load_format": "dummy"}
    assert load_config(None, overrides).config.cache.metrics_sample == 0.5


def test_a_setting_without_two_that_it_needs_is_refused_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"kv_events.buffer_steps": "5"})
    assert len(str(caught.value).splitlines()) == 1


def test_a_tree_made_in_python_is_validated() -> None:
    validate(EngineConfig())
    with pytest.raises(ConfigError, match=r"cache.block_size: 3 is no power of two"):
        validate(EngineConfig(cache=CacheConfig(block_size=3)))
    with pytest.raises(ConfigError, match=r"plugins.allow: expected a list"):
        validate(EngineConfig(plugins=PluginsConfig(allow="builtin")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"attention.options: expected a table of options"):
        validate(EngineConfig(attention=AttentionConfig(options=3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["scheduler.max_running", "scheduler.max_num_seqs", "max_running", "max_num_seqs"])
def test_a_setting_can_be_spelled_in_several_ways(key: str) -> None:
    assert canonical_key(key) == "scheduler.max_running"
    resolved = load_config(None, {key: 4})
    assert (resolved.config.scheduler.max_running, resolved.origins["scheduler.max_running"]) == (4, "--max-running")


def test_a_section_is_never_a_setting() -> None:
    with pytest.raises(ConfigError, match="scheduler is a section"):
        load_config(None, {"scheduler": "fcfs"})


def test_two_spellings_of_one_setting_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs and max_running are one setting; give one of them"):
        load_config(None, {"scheduler.max_running": 4, "max_num_seqs": 4})


def test_an_override_may_spell_a_setting_of_the_file_differently(write: WriteFile) -> None:
    file = write('max_num_seqs = 3\ntokenizer = "tok"\n')
    resolved = load_config(file, {"scheduler.max_running": 5})
    assert resolved.config.scheduler.max_running == 5
    assert resolved.config.model.tokenizer == str(file.parent / "tok")
