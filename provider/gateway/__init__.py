"""The only code that parses bytes from the network. Read in this order:

gateway       accepts authenticated connections
reception     handshakes, by networks in turn, before a connection has a thread
strangers     connections that are not authenticated yet
connection    one tenant's connection: requests in, answers out
link          sockets with deadlines
slots         how many connections a tenant may have
admission     memory for requests, and each tenant's role
quota         rates: requests, rows and work per second
usage         the bill
credentials   certificates and the revocation list
"""
