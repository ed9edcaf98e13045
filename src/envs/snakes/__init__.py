"""3v3 snakes of the Jidi competition: engine, opponents, observations, rewards and replays, batched over boards."""
