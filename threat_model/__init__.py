"""The reviewer's side: code whose job is to disbelieve the rest.

An adversary gets exactly what a party of a real run sees (its view) and the public model; named attacks
turn views into a success rate that stands beside what chance would score. `symbiosis-priv threat-model`
runs every attack against every masking scheme and also lists what is not hidden; `symbiosis-priv verify`
checks somebody else's provider for exactness, property by property. Alone among the packages this one may
import all of the others.
"""
