"""An echoing server that draws every answer to be checked and leaves the checking to others."""

from __future__ import annotations

import argparse

from gateway.bench.echo_server import echo_app, echo_settings
from gateway.edge.server import make_server
from gateway.observe.telemetry import configure_logging

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database-url", required=True)
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    options = parser.parse_args()
    # Without a router everything goes to the top tier, whose answers are drawn downward.
    drawing = {
        "verification__worker": False,
        "policy__sampling__down_share": 1.0,
        "policy__exploration_share": 0.0,
    }
    settings = echo_settings(options.database_url, port=options.port, **drawing)
    configure_logging(settings.log)
    make_server(echo_app(settings, token_delay_s=options.token_delay_s), settings).run()
