"""The only code that parses bytes from the network. Read in this order:

gateway       accepts authenticated connections
reception     handshakes, before anybody has a thread
strangers     connections that are not authenticated yet
turns         which network is next
connection    one tenant's connection: requests in, answers out
link          sockets with deadlines
admission     who may come in, and with how many bytes
quota         rows per second and per month
usage         the bill
credentials   certificates and the revocation list
"""
