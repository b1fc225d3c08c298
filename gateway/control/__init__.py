"""What is in force and who may change it: policies, routers, rollouts, kill switch; and the watch over the floor."""
