"""What a model must be to be sharded, and who else holds or reads its parameters."""
