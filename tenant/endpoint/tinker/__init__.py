"""Tinker's API: fine-tuning loops of the official client `tinker` run against this endpoint. Read in this order:

wire         Tinker's protocol buffers: examples to train on and their losses, log probabilities, and samples
together     the products of several passes through the model as one product
checkpoints  checkpoints as PEFT folders, below one folder on disk
futures      the answers that clients fetch later
training     the training clients, and the thread that computes their steps
sampling     samples from the endpoint's engine
routes       the HTTP routes, and what is refused

The types of JSON bodies are those of the package `tinker` itself (`tinker.types`).
"""
