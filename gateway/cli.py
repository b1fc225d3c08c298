"""Declares the command ``suffice``. What its commands do is in :mod:`gateway.commands`, imported when one is run."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.admin_group import AdminGroup

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="TOML file; by default SUFFICE_CONFIG, else the built-in ladder."
    ),
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="A running server; by default the configured address.")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="suffice",
    help="One OpenAI-style endpoint that answers every request with the cheapest model that suffices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
keys_app = typer.Typer(help="API keys: made once, stored hashed.", no_args_is_help=True)
admin_app = typer.Typer(
    cls=AdminGroup,
    help="Steer a running server, as /admin/v1 does; SUFFICE_ADMIN_KEY holds the key.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
db_app = typer.Typer(help="The database's schema.", no_args_is_help=True)
config_app = typer.Typer(help="The active settings, and whether a file is sound.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements; each prints its card and one line of JSON.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(admin_app, name="admin")
app.add_typer(db_app, name="db")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line. Exit status 2 for what the caller wrote wrongly, 1 for what failed, 130 for Ctrl-C."""
    from gateway.failure_report import exit_status_of

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        status = exit_status_of(error)
        if status is None:
            raise
        sys.exit(status)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"suffice {metadata.version('suffice')}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def up(config: ConfigOption = None, host: HostOption = None, port: PortOption = None) -> None:
    """Serve, showing how the models load and how to call them."""
    from gateway.commands.serve import up as run

    run(config, host=host, port=port)


@app.command()
def serve(config: ConfigOption = None, host: HostOption = None, port: PortOption = None) -> None:
    """Serve, printing nothing but the log."""
    from gateway.commands.serve import serve as run

    run(config, host=host, port=port)


@app.command("verify-worker")
def verify_worker(
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left that may be done now.")] = False,
) -> None:
    """Verify sampled answers in a process of its own, against the servers' database."""
    from gateway.commands.verify_worker import verify_worker as run

    run(config, once=once)


@app.command()
def chat(
    config: ConfigOption = None,
    url: UrlOption = None,
    model: Annotated[str, typer.Option("--model", "-m", help="auto, a tier, a served model or a policy.")] = "auto",
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
) -> None:
    """Talk to a running server; every answer says which tier gave it and what it cost."""
    from gateway.commands.chat import chat as run

    run(config, url=url, model=model, system=system)


@app.command()
def route(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    config: ConfigOption = None,
    policy: Annotated[str | None, typer.Option("--policy", help="A policy by name.")] = None,
    min_tier: Annotated[int | None, typer.Option("--min-tier", help="Lowest tier number.")] = None,
    max_tier: Annotated[int | None, typer.Option("--max-tier", help="Highest tier number.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain which tier a prompt would go to, without answering it."""
    from gateway.commands.route import route as run

    run(prompt, config, policy=policy, min_tier=min_tier, max_tier=max_tier, as_json=as_json)


@app.command()
def plan(
    config: ConfigOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="A known device, such as h200; by default this machine's.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option("--memory-gib", help="Memory of the device instead.")] = None,
    reference: Annotated[bool, typer.Option("--reference", help="The 3B/8B/70B ladder in 4 bits.")] = False,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a request; by default 4096 or less.")
    ] = None,
    shares: Annotated[str | None, typer.Option("--shares", help="Requests per tier, such as 60,20,15,5.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a ladder fits a device, and how many requests at once it leaves room for."""
    from gateway.commands.plan import plan as run

    run(config, gpu=gpu, memory_gib=memory_gib, reference=reference, context=context, shares=shares, as_json=as_json)


@app.command(context_settings=PASS_ON)
def bootstrap(context: typer.Context) -> None:
    """Fit the first router from prompts of your own (see suffice bootstrap --help)."""
    from gateway.commands.module_runner import run_module

    run_module("gateway.outcomes.bootstrap", "suffice bootstrap", context.args)


@app.command()
def retrain(
    config: ConfigOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the run.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Judge a candidate, and write nothing.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of folds and trees.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Learn a router from the log, and let it serve if it is better beyond doubt."""
    from gateway.commands.retrain import retrain as run

    run(config, reason=reason, dry_run=dry_run, seed=seed, quiet=quiet, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True})
def evaluate(
    context: typer.Context,
    train: Annotated[Path, typer.Option("--train", help="Folder with prompts.parquet and scores.parquet to fit on.")],
    test: Annotated[Path, typer.Option("--test", help="Folder to judge on; the same one means its own folds.")],
    weak: Annotated[str | None, typer.Option("--weak", help="The cheap model, as the folders name it.")] = None,
    strong: Annotated[str | None, typer.Option("--strong", help="The dear model.")] = None,
    ladder: Annotated[
        str | None, typer.Option("--ladder", metavar="MODEL ...", help="Instead of a pair: models, cheapest first.")
    ] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option("--benchmark", help="Only this benchmark's prompts; repeatable.")
    ] = None,
    transfer: Annotated[bool, typer.Option("--transfer", help="Fit on every benchmark but --benchmark.")] = False,
    floor: Annotated[float, typer.Option("--floor", help="Share of the strong model's quality to certify.")] = 0.95,
    confidence: Annotated[float, typer.Option("--confidence", help="Confidence of the certificate.")] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="Of fits and resamples.")] = 0,
    resamples: Annotated[int, typer.Option("--resamples", help="Of intervals and of the certificate.")] = 200,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", metavar="MODEL=IN,OUT", help="USD per million tokens, where the folder has none."),
    ] = None,
    curve: Annotated[
        str | None, typer.Option("--curve", help="Numbers of labels for a learning curve, such as 100,1000.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON.")] = False,
) -> None:
    """Judge routing between models on graded prompts, beside prompt length, chance, a fixed mix and an oracle."""
    from gateway.commands.evaluate import evaluate as run

    if context.args and ladder is None:
        raise typer.BadParameter(f"unexpected {' '.join(context.args)!r}")
    run(
        train,
        test,
        weak=weak,
        strong=strong,
        ladder=[ladder, *context.args] if ladder is not None else [],
        benchmark=benchmark or [],
        transfer=transfer,
        floor=floor,
        confidence=confidence,
        seed=seed,
        num_resamples=resamples,
        price=price or [],
        curve=curve,
        as_json=as_json,
    )


@app.command()
def simulate(
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="Repeatable; by default all of them.")
    ] = None,
    weeks: Annotated[int, typer.Option("--weeks", help="Simulated weeks.")] = 12,
    requests_per_week: Annotated[int, typer.Option("--requests-per-week", help="Of all tenants.")] = 4000,
    seed: Annotated[int, typer.Option("--seed", help="Of traffic, dice and judge.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FOLDER", help="Draw each scenario there.")] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the lines of JSON.")] = False,
) -> None:
    """Let weeks of traffic with known truth pass through router, policy, checks, monitor and retraining."""
    from gateway.commands.simulate import simulate as run

    run(
        config,
        tuple(scenario or ()),
        weeks=weeks,
        requests_per_week=requests_per_week,
        seed=seed,
        plot_folder=plot,
        as_json=as_json,
    )


def _add_bench(name: str, module: str, help_text: str) -> None:
    @bench_app.command(name, context_settings=PASS_ON, help=help_text)
    def _bench(context: typer.Context) -> None:
        from gateway.commands.module_runner import run_module

        run_module(module, f"suffice bench {name}", context.args)


_add_bench("ladder", "gateway.bench.ladder", "Accuracy and cost of every tier and of routing, over HTTP.")
_add_bench("graders", "gateway.bench.graders", "How well each grader tells good answers from bad, and what it costs.")
_add_bench("tools", "gateway.bench.tool_calls", "What routing and free checks are worth on recorded tool calls.")
_add_bench("overhead", "gateway.bench.overhead", "CPU time the gateway adds to a request and to a streamed chunk.")
_add_bench("overload", "gateway.bench.overload", "Three times what a server can take, from tenants of unequal greed.")
_add_bench("escalation", "gateway.bench.escalation", "What escalation earns and what predictions save.")
_add_bench("healing", "gateway.bench.healing", "A server meets unknown kinds of task, and heals without a hand.")
_add_bench(
    "kills", "gateway.bench.kills", "Kill server, worker and retraining; count what was lost, doubled or half made."
)
_add_bench("durability", "gateway.bench.durability", "Kill the server under load; count the answers its log has lost.")
_add_bench("statistics", "gateway.bench.statistics", "Simulated histories that hold every statistic to what it states.")


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Option("--name", help="What the key is for.")] = "unnamed",
    tenant: Annotated[str, typer.Option("--tenant", help="Whose requests it makes.")] = "default",
    scope: Annotated[
        str,
        typer.Option("--scope", help="use: the models; admin: the administration; admin-read: what of it only reads."),
    ] = "use",
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", help="Most requests.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option("--tokens-per-minute", help="Most tokens.")] = None,
    budget_usd_per_day: Annotated[str | None, typer.Option("--budget-usd-per-day", help="Most dollars.")] = None,
    budget_usd_per_month: Annotated[str | None, typer.Option("--budget-usd-per-month", help="Most dollars.")] = None,
    max_concurrency: Annotated[int | None, typer.Option("--max-concurrency", help="Most requests at once.")] = None,
    max_tenant_concurrency: Annotated[
        int | None, typer.Option("--max-tenant-concurrency", help="Most requests of its tenant at once.")
    ] = None,
    allowed_policies: Annotated[
        list[str] | None, typer.Option("--allowed-policy", help="Only this policy; may be repeated.")
    ] = None,
    allowed_tiers: Annotated[
        list[str] | None, typer.Option("--allowed-tier", help="Only this tier, by name or number; may be repeated.")
    ] = None,
    allowed_regions: Annotated[
        list[str] | None, typer.Option("--allowed-region", help="Only this region; may be repeated.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", help="After so long (90d, 12h), or at this date or moment (UTC).")
    ] = None,
    is_new: Annotated[bool, typer.Option("--create", help="Make the database too, where there is none.")] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not ask the running server whether it uses this database.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it: this is the only time it can be seen."""
    from gateway.commands.keys import create

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "budget_usd_per_day": budget_usd_per_day,
        "budget_usd_per_month": budget_usd_per_month,
        "max_concurrency": max_concurrency,
        "max_tenant_concurrency": max_tenant_concurrency,
    }
    permissions = {
        "allowed_policies": allowed_policies or None,
        "allowed_tiers": allowed_tiers or None,
        "allowed_regions": allowed_regions or None,
    }
    create(
        config,
        name=name,
        tenant=tenant,
        scope=scope,
        limits=limits,
        permissions=permissions,
        expires=expires,
        is_new=is_new,
        offline=offline,
        as_json=as_json,
    )


@keys_app.command("list")
def keys_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the keys by their prefixes."""
    from gateway.commands.keys import list_all

    list_all(config, as_json=as_json)


@keys_app.command("rotate")
def keys_rotate(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, its prefix, or the key itself.")],
    config: ConfigOption = None,
) -> None:
    """Give a key another secret and print it. The old one ends; a running server follows within auth.key_cache_s."""
    from gateway.commands.keys import rotate

    rotate(config, key)


@keys_app.command("revoke")
def keys_revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id, its prefix, or the key itself.")],
    config: ConfigOption = None,
) -> None:
    """Revoke a key. A running server follows within auth.key_cache_s."""
    from gateway.commands.keys import revoke

    revoke(config, key)


@app.command()
def openapi(config: ConfigOption = None) -> None:
    """Print the OpenAPI document of every path."""
    from gateway.commands.openapi import print_document

    print_document(config)


@db_app.command("upgrade")
def db_upgrade(config: ConfigOption = None) -> None:
    """Bring the schema up to this version."""
    from gateway.commands.database import upgrade

    upgrade(config)


@db_app.command("current")
def db_current(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Say which revision the database is at, and which this version needs."""
    from gateway.commands.database import current

    current(config, as_json=as_json)


@db_app.command("prune")
def db_prune(
    config: ConfigOption = None,
    texts_days: Annotated[
        int | None, typer.Option("--texts-days", min=0, max=36500, help="Forget prompts and answers older than this.")
    ] = None,
    rows_days: Annotated[
        int | None, typer.Option("--rows-days", min=0, max=36500, help="Forget whole rows older than this.")
    ] = None,
    sessions_days: Annotated[
        int | None,
        typer.Option("--sessions-days", min=0, max=36500, help="Forget conversations that rest longer than this."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Forget what is older than told; a server may run meanwhile."""
    from gateway.commands.database import prune

    prune(config, texts_days=texts_days, rows_days=rows_days, sessions_days=sessions_days, as_json=as_json)


@db_app.command("erase")
def db_erase(
    config: ConfigOption = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Everything of this tenant.")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="ID", help="Everything made with this key.")] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="This conversation; --tenant may narrow it.")
    ] = None,
    request: Annotated[str | None, typer.Option("--request", metavar="ID", help="This request.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Erase what every table holds of a tenant, a key, a conversation or a request; a server may run meanwhile."""
    from gateway.commands.database import erase
    from gateway.store.erasure import ErasureTarget

    target = ErasureTarget(tenant=tenant, key_id=key, session_id=session, request_id=request)
    erase(config, target, as_json=as_json)


@config_app.command("show")
def config_show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting, its value and where that was written; passwords are hidden."""
    from gateway.commands.settings import show

    show(config, as_json=as_json)


@config_app.command("validate")
def config_validate(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="TOML file; by default what would be served.")
    ] = None,
    secrets: Annotated[bool, typer.Option(help="Whether the variables that hold API keys must be set.")] = True,
) -> None:
    """Check a configuration without serving it; exit status 2 lists everything wrong."""
    from gateway.commands.settings import validate

    validate(file, need_secrets=secrets)


if __name__ == "__main__":
    main()
