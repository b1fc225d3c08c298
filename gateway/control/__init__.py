"""The control plane: active policies, routers, rollouts, kill switch, their changes, and the watch over the floor."""
