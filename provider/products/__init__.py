"""Products with the weights of one model.

operands    packed weights on their devices, and copies of rows to a device and back
model       the layers that this provider serves, and the float path, with and without bias
"""
