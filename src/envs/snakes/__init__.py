"""3v3 snakes of the Jidi competition: engine, rewards, observations, opponents and replays of many boards at once."""
