"""What a unit does in a step: its parameters are gathered, used and released, its gradients reduced."""
