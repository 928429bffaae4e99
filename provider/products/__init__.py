"""Products with the weights of one model.

model       the layers that this provider serves
operands    packed weights on their devices, and copies of rows to a device and back
floats      the float path, with and without bias
"""
