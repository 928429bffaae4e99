"""What an attack is given, and what judges it. Read in this order:

views        what each party sees of a real run
public       what everybody knows: the checkpoint
truth        what the tenant alone knows; only scorers read it
schemes      the masking schemes under attack
neighbour    a second tenant of the same executor
twins        a second certificate for the same key
statistics   scores, their chance level and intervals
"""
