"""Attacks on this project, and tests of its promises.

An adversary gets what a party of a real run sees (its view), and the public model. Each attack computes a guess from a
view; its success rate is compared with the rate of guessing. `symbiosis-priv threat-model` runs every attack against
every masking scheme, and lists what is not hidden. `symbiosis-priv verify` tests any provider for exactness, property
by property. Only this package may import all of the others.

Read in this order: `evidence`, `attacks`, `lab` (a real run), `active` and `availability` (adversaries that act),
`planted` (faults that the attacks must find), `suite`, `report`, and `conformance` for `verify`.
"""
