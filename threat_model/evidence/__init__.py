"""The input of attacks, and the data that scores them. Read in this order:

    views        the view of each party of a real run
    public       public knowledge: the checkpoint
    truth        the tenant's own knowledge; only scorers read it
schemes      the masking schemes under attack
neighbour    a second tenant of the same executor
statistics   scores, their chance level and intervals
"""
