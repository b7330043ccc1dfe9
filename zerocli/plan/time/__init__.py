"""The time of a step: a machine's rates, what a model computes, and the seconds of both."""
