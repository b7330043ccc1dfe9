"""Models and training loops of every kind, each equal to plain torch when sharded, or refused in clear words."""
