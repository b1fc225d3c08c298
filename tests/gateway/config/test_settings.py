"""The settings object: layers, types, refusals that name file and key, and where every value came from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.config import LocalModelConfig, RemoteModelConfig
from gateway.config import display
from gateway.config.errors import SettingsError, SettingsFileMalformed, SettingsFileMissing
from gateway.config.settings import Settings, load_settings
from policies.types import ThresholdMode

HOME = {"HOME": "/home/someone"}

# Every section, and every kind of model, with values of every type.
FULL = Path(__file__).with_name("full.toml")

# Settings that are gone, with what they were by default.
REMOVED_SINCE = {"learning.prefill_probe": False}
# Settings that came later; with each the hash of every configuration is another one.
ADDED_SINCE = {
    *("server.allowed_hosts", "server.trusted_proxies", "metrics.public"),
    *("server.max_queue_s", "server.body_timeout_s", "server.max_connections", "server.lame_duck_s"),
    "server.conversation_ttl_s",
    *("server.max_body_bytes_in_flight", "server.max_body_bytes_in_flight_per_key"),
    *("log.texts_days", "log.rows_days", "log.sessions_days", "log.history_days"),
    *("log.responses", "log.responses_days"),
    *("database.report_timeout_s", "server.max_tools", "server.sse_ping_s", "aliases.claude-*"),
}
# Settings whose default is another now, with what it was.
CHANGED_SINCE = {
    "verification.graders": ["final_answer", "overlap", "embedding", "likelihood"],
    "server.max_concurrency": 256,
    "server.queue_limit": 512,
    "server.keep_alive_timeout_s": 15.0,
}
# Likewise of every policy, and of each model that is served in-process, or by a remote server.
ADDED_TO_POLICIES = (*(f".escalation.{name}" for name in ("low_confidence", "faults", "hold_calls")), ".on_break")
ADDED_TO_LOCAL = (".max_outstanding", ".tool_format")
ADDED_TO_REMOTE = (".health_check",)
ADDED_TO_TIERS = (".price_per_cached_token_usd",)

OWN_LADDER = """
[[tiers]]
name = "small"
model = "a"
price_per_input_token_usd = 0.00000015

[[tiers]]
name = "large"
model = "b"
price_per_request_usd = 0.01

[models.a]
path = "builtin:tier1"

[models.b]
urls = ["http://127.0.0.1:9000/v1", "http://127.0.0.1:9001/v1"]
model = "big"
timeouts.connect_s = 1
"""

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load settings from the text of a file and some variables."""

    def _load(text: str | None = None, environ: dict[str, str] | None = None, **rest: object) -> Settings:
        path = None
        if text is not None:
            path = tmp_path / "suffice.toml"
            path.write_text(text, encoding="utf-8")
        return load_settings(path, environ=HOME | (environ or {}), **rest)  # type: ignore[arg-type]

    return _load


def refusal(load: Load, text: str | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(text, environ)
    return str(caught.value)


def test_defaults_serve_the_builtin_ladder(load: Load) -> None:
    settings = load()
    assert [tier.name for tier in settings.ladder] == ["simple", "medium", "complex", "expert"]
    assert [str(tier.price_per_request_usd) for tier in settings.ladder] == ["0.0001", "0.0005", "0.003", "0.01"]
    assert all(isinstance(settings.models[tier.model], LocalModelConfig) for tier in settings.ladder)
    assert settings.router.artifact == "builtin"
    assert settings.database.url == "sqlite:////home/someone/.local/state/suffice/suffice.db"


def test_each_layer_wins_over_the_one_below_and_says_so(load: Load) -> None:
    text = "[server]\nport = 1000\nhost = '127.0.0.2'\nqueue_limit = 7"
    settings = load(
        text, {"SUFFICE_SERVER__PORT": "2000", "SUFFICE_SERVER__HOST": "::1"}, overrides={"server.port": 3000}
    )
    assert (settings.server.port, settings.server.host, settings.server.queue_limit) == (3000, "::1", 7)
    assert settings.sources["server.port"] == "command line"
    assert settings.sources["server.host"] == "environment SUFFICE_SERVER__HOST"
    assert settings.sources["server.queue_limit"].endswith("suffice.toml")
    assert settings.sources["server.max_n"] == "default"
    assert settings.sources["tiers.simple.model"] == "built-in ladder"


def test_own_ladder_starts_from_nothing(load: Load) -> None:
    settings = load(OWN_LADDER)
    assert [(tier.index, tier.name, tier.model) for tier in settings.ladder] == [(1, "small", "a"), (2, "large", "b")]
    assert set(settings.models) == {"a", "b"}
    assert settings.router.artifact == "none"
    remote = settings.models["b"]
    assert isinstance(remote, RemoteModelConfig)
    assert remote.urls == ("http://127.0.0.1:9000/v1", "http://127.0.0.1:9001/v1")
    assert remote.timeouts.connect_s == 1.0


def test_money_is_exact(load: Load) -> None:
    assert load(OWN_LADDER).ladder[0].price_per_input_token_usd == Decimal("0.00000015")
    environ = {"SUFFICE_TIERS__SMALL__PRICE_PER_INPUT_TOKEN_USD": "0.1"}
    assert load(OWN_LADDER, environ).ladder[0].price_per_input_token_usd == Decimal("0.1")


def test_names_in_variables_match_names_with_dashes(load: Load) -> None:
    settings = load(environ={"SUFFICE_MODELS__BUILTIN_3_THINKING__SPECULATION__MAX_DRAFT_TOKENS": "2"})
    model = settings.models["builtin-3-thinking"]
    assert isinstance(model, LocalModelConfig)
    assert model.speculation.max_draft_tokens == 2
    assert model.speculation.mode == "draft"


def test_policies_follow_the_default_one(load: Load) -> None:
    text = """
    [policy]
    quality_floor = 0.9
    allowed_tiers = ["simple", "expert"]
    [policies.cheap]
    mode = "benefit"
    quality_value_usd = 0.01
    thresholds.simple = 0.5
    """
    settings = load(text)
    cheap = settings.policies["cheap"]
    assert cheap.mode is ThresholdMode.BENEFIT
    assert cheap.quality_floor == 0.9
    assert cheap.allowed_tiers == (1, 4)
    assert cheap.thresholds == {1: 0.5}
    assert cheap.name == "cheap"
    assert settings.policies["default"] is settings.policy
    assert settings.sources["policies.cheap.quality_floor"] == "as in [policy]"


def test_tier_names_in_a_variable(load: Load) -> None:
    assert load(environ={"SUFFICE_POLICY__ALLOWED_TIERS": "medium, 4"}).policy.allowed_tiers == (2, 4)


def test_version_of_a_policy_is_its_content(load: Load) -> None:
    plain, again = load().policy, load("[policy]").policy
    edited = load("[policy]\nquality_floor = 0.5").policy
    assert plain.version == again.version != edited.version


def test_config_hash_changes_with_any_setting_and_not_with_passwords(load: Load) -> None:
    hashes = [
        load(environ=environ).config_hash
        for environ in (
            {},
            {"SUFFICE_SERVER__MAX_N": "3"},
            {"SUFFICE_DATABASE__URL": "postgresql://me:one@db/x"},
            {"SUFFICE_DATABASE__URL": "postgresql://me:two@db/x"},
        )
    ]
    assert hashes[0] != hashes[1] != hashes[2]
    assert hashes[2] == hashes[3]


@pytest.mark.parametrize(("file", "digest"), [(None, "4450a5fe6f20"), (FULL, "6569b971a82b")])
def test_config_hash_of_an_unchanged_configuration_stays(file: Path | None, digest: str) -> None:
    """It stands in every row of logs that exist; the digests are those of the first release to have it."""
    settings = load_settings(file, environ=HOME | {"BIG_KEY": "secret"})
    shown = {path: value for path, value in settings.shown().items() if path != "data_dir"}
    assert settings.config_hash == display.digest(shown)
    local = tuple(path.removesuffix(".max_num_seqs") for path in shown if path.endswith(".max_num_seqs"))
    added = {*ADDED_SINCE, *(model + name for model in local for name in ADDED_TO_LOCAL)}
    endings = (*ADDED_TO_REMOTE, *ADDED_TO_POLICIES, *ADDED_TO_TIERS)
    then = {path: value for path, value in shown.items() if path not in added and not path.endswith(endings)}
    changed = {path: value for path, value in CHANGED_SINCE.items() if settings.sources[path] == "default"}
    assert display.digest(then | REMOVED_SINCE | changed) == digest


def test_passwords_are_not_shown(load: Load) -> None:
    settings = load(environ={"SUFFICE_DATABASE__URL": "postgresql://me:se:cret@db/x"})
    assert settings.shown()["database.url"] == "postgresql://me:***@db/x"
    assert settings.database.url == "postgresql://me:se:cret@db/x"


def test_secrets_are_read_by_name_and_stay_out_of_repr(load: Load) -> None:
    text = OWN_LADDER + 'api_key_env = "BIG_KEY"\n'
    settings = load(text, {"BIG_KEY": "sk-very-secret"})
    assert settings.api_keys == {"b": "sk-very-secret"}
    assert "sk-very-secret" not in repr(settings) + str(settings.shown())
    assert "models.b.api_key_env: names the variable BIG_KEY, which is not set" in refusal(load, text)
    assert load(text, need_secrets=False).api_keys == {}


def test_settings_are_frozen(load: Load) -> None:
    with pytest.raises(FrozenInstanceError):
        load().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[servr]\nport = 1", "servr: unknown key; did you mean server?"),
        ("[server]\nprot = 1", "server.prot: unknown key; did you mean server.port?"),
        ("[server]\nport = '1'", "server.port: is '1'; expected a whole number"),
        ("[server]\nport = 70000", "server.port: is 70000; expected at least 0 and at most 65535"),
        ("[server]\nport = true", "server.port: is True; expected a whole number"),
        ("[server]\nrequest_timeout_s = nan", "expected a finite number"),
        ("[server]\ncors_origins = ['a', 1]", "server.cors_origins: is ['a', 1]; expected a list, each a string"),
        ("server = 1", "server: is 1; expected a table"),
        ("[auth]\nrequired = 'maybe'", "auth.required: is 'maybe'; expected one of 'auto', 'always', 'never'"),
        ("[policy]\nquality_floor = 1.5", "policy.quality_floor: is 1.5; expected a share from 0 to 1"),
        ("[policy]\nmode = 'cheap'", "policy.mode: is 'cheap'; expected one of 'floor', 'benefit'"),
        (
            "[policy]\nallowed_tiers = ['simpel']",
            "policy.allowed_tiers: 'simpel' is not a tier; known: 'simple'",
        ),
        ("[policy.thresholds]\nsimpel = 0.5", "policy.thresholds: 'simpel' is not a tier"),
        (
            "[policy.thresholds]\nsimple = 'x'",
            "policy.thresholds: is {'1': 'x'}; expected a table, each value a finite number",
        ),
        ("[policy]\nallowed_tiers = [9]", "allowed_tiers is [9]; expected numbers among [1, 2, 3, 4]"),
        ("[policy]\nname = 'x'", "policy.name: unknown key"),
        ("[policies.default]\nmode = 'floor'", "policies.default: the default policy is written as [policy]"),
        (
            "[database]\nurl = 'mysql://x/y'",
            "database.url: is 'mysql://x/y'; expected a URL that begins with sqlite://",
        ),
        ("[redis]\nurl = 'http://x'", "redis.url"),
        ("[models.x]\npath = 'y'\nkind = 'magic'", "models.x.kind: is 'magic'; expected one of 'local', 'remote'"),
        ("[models.x]\nkind = 'local'", "models.x.path: missing; expected a string"),
        ("[models.x]\nurls = []\nmodel = 'm'", "models.x.urls: is []; expected at least one base URL"),
        ("[models.builtin-1]\nspeculation.mode = 'fast'", "models.builtin-1.speculation.mode: is 'fast'"),
        ("[models.builtin-1]\nthreads = 0", "models.builtin-1.threads: is 0; expected at least 1"),
        ("[models.x]\nkind = []", "models.x.kind: is []; expected one of 'local', 'remote', 'echo', 'replay'"),
        ("[models]\nx = 3", "models.x: is 3; expected a table"),
        ("models = 3", "models: is 3; expected a table"),
        ("policies = 3", "policies: is 3; expected a table"),
        ("tiers = 3", "tiers: expected a list of tables"),
        ("aliases = 3", "aliases: is 3; expected a table"),
        ("[aliases]\n'claude-*' = 'gpt-4'", "aliases.claude-*: is 'gpt-4'; expected a policy, a tier or a model: "),
        ("[aliases]\n'opus-*' = 'claude-opus'", "aliases.opus-*: is 'claude-opus'; expected a policy"),
        ("[aliases]\nopus = ''", "aliases.opus: is ''; expected a policy, a tier or a model"),
        ("[aliases]\nopus = 3", "aliases.opus: is 3; expected a string"),
        ("[aliases]\n'*-opus' = 'auto'", "aliases.*-opus: is no name; expected one with at most one *, at its end"),
        ("[aliases]\n'a**' = 'auto'", "aliases.a**: is no name"),
        ("[aliases]\nsimple = 'expert'", "aliases.simple: is the name of a policy, a tier or a model already"),
        ("[[tiers]]\nmodel = 'x'", "tiers[1].name: expected a name"),
        ("[[tiers]]\nname = 'a'\nmodel = 'x'", "tiers.a.model: is 'x', which no [models] table describes; known: none"),
        ("[[tiers]]\nname='a'\nmodel='x'\n[[tiers]]\nname='a'", "tiers[2].name: 'a' is the name of an earlier tier"),
    ],
)
def test_refusals_name_the_key_and_the_file(load: Load, tmp_path: Path, text: str, message: str) -> None:
    complaint = refusal(load, text)
    assert message in complaint
    assert str(tmp_path / "suffice.toml") in complaint or "no value given" in complaint


def test_a_model_whose_kind_is_unknown_is_one_problem(load: Load) -> None:
    """Neither its other keys, nor the tiers that name it, can be judged."""
    complaint = refusal(load, "[models.builtin-1]\nkind = 'magic'\nnope = 1")
    assert len(complaint.splitlines()) == 1


def test_negative_price_is_refused(load: Load) -> None:
    complaint = refusal(load, OWN_LADDER.replace("0.01", "-0.01"))
    assert "tiers.large.price_per_request_usd: is '-0.01'; expected a finite amount of dollars, 0 or more" in complaint


def test_all_problems_are_reported_at_once(load: Load) -> None:
    complaint = refusal(load, "[server]\nport = 'a'\nhots = 'b'\n[log]\nlevel = 'loud'")
    assert len(complaint.splitlines()) == 3


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "SUFFICE_SERVER__PORT",
            "many",
            "server.port: is 'many'; expected a whole number (environment SUFFICE_SERVER__PORT)",
        ),
        ("SUFFICE_SERVER__PROT", "1", "server.prot: unknown key; did you mean server.port?"),
        ("SUFFICE_SERVER_PORT", "1", "parted by two underscores: SUFFICE_SERVER__PORT?"),
        ("SUFFICE_SERVER__", "1", "expected SUFFICE_SECTION__KEY"),
        ("SUFFICE_METRICS__ENABLED", "yes", "metrics.enabled: is 'yes'; expected true or false"),
        ("SUFFICE_SERVER__PORT", "1\nhost = 2", "expected a whole number"),
    ],
)
def test_variables_are_refused_by_name(load: Load, variable: str, value: str, message: str) -> None:
    assert message in refusal(load, environ={variable: value})


def test_other_peoples_variables_are_left_alone(load: Load) -> None:
    assert load(environ={"SUFFICE_TEST_POSTGRES_URL": "x", "SUFFICE_DATA_DIR": "/tmp/d"}).data_dir == Path("/tmp/d")


def test_file_is_named_by_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[server]\nport = 4")
    assert load_settings(environ=HOME | {"SUFFICE_CONFIG": str(path)}).server.port == 4


def test_unreadable_files_are_typed(tmp_path: Path) -> None:
    with pytest.raises(SettingsFileMissing, match=r"nowhere\.toml"):
        load_settings(tmp_path / "nowhere.toml", environ=HOME)
    for content in (b"[server\n", b"\xff\xfe", b"a = 1\na = 2", b"x = " + b"[" * 5000):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(SettingsFileMalformed, match=r"bad\.toml"):
            load_settings(tmp_path / "bad.toml", environ=HOME)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(
        ["server.port", "policy.thresholds", "tiers.simple.model", "models.builtin-1.path", "models", "tiers"]
    ),
)
def test_any_value_loads_or_is_refused_by_type(value: object, path: str) -> None:
    try:
        settings = load_settings(environ=HOME, overrides={path: value})
    except SettingsError:
        return
    assert isinstance(settings, Settings)


def test_devices_are_read_by_one_name(load: Load) -> None:
    settings = load(
        '[devices.cuda]\nkv_bytes = 1000\n[devices."cuda:1"]\nkv_bytes = 2000\n[devices.cpu]\nkv_bytes = 3\n'
    )
    assert {name: device.kv_bytes for name, device in settings.devices.items()} == {
        "cuda:0": 1000,
        "cuda:1": 2000,
        "cpu": 3,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[devices.gpu]\nkv_bytes = 1", "devices.gpu: is no device; expected cpu, cuda or cuda:N"),
        ("[devices.cuda]", "devices.cuda.kv_bytes: missing; expected a whole number"),
        ("[devices.cuda]\nkv_bytes = 0", "devices.cuda.kv_bytes: is 0; expected at least 1"),
        ('[devices.cuda]\nkv_bytes = "all"', "devices.cuda.kv_bytes: is 'all'; expected a whole number"),
        ("[devices.cuda]\nkv_bytes = 1\nshare = 1", "devices.cuda.share"),
        ('[devices.cuda]\nkv_bytes = 1\n[devices."cuda:0"]\nkv_bytes = 1', "devices.cuda:0: is cuda:0, which another"),
        ("devices = 3", "devices: is 3; expected a table"),
    ],
)
def test_devices_that_make_no_sense_are_refused(load: Load, text: str, message: str) -> None:
    assert message in refusal(load, text)


def test_importing_settings_loads_no_model_library() -> None:
    code = (
        "import sys, gateway.config.settings as s; s.load_settings(environ={}); "
        "print([m for m in ('torch', 'numpy', 'sklearn', 'transformers', 'httpx', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
