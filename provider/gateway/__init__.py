"""The only code that parses bytes from the network. Read in this order:

gateway          serves authenticated connections, one thread each
reception        accepts connections and makes their handshakes
unauthenticated  limits the connections that are not authenticated
connection       checks the requests of one connection and sends the answers
slots            limits the connections of each tenant
admission        limits the memory for requests, and keeps each tenant's role
quota            limits each tenant's requests, rows and work per second
usage            counts what each tenant has used
credentials      certificates and the revocation list
"""
