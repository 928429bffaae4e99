"""Tests that need a GPU: `make gpu`."""
