"""What privacy and integrity rest on: pads, masked rows, the check of every answer. Read in this order:

facts      public facts of a layer group: widths, scales, bounds
pads       draws and burns one-time pads, and opens masked answers
rows       rows of a product, as floats or as integers
parts      the rows of one request, with their pads and their check
verifier   Freivalds' check over the integers, and the keys that tell who lied
backend    products as the model asks for them
"""
