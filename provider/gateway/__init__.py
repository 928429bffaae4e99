"""The only code that parses what tenants and helpers send. Read in this order:

gateway          serves authenticated connections, one thread each
listener         accepts connections, makes their handshakes, and limits those that are not authenticated
frames           reads and answers the frames of one connection, within limits and deadlines
connection       checks the requests of a tenant's connection and sends the answers; takes the blocks of a helper's
repeated         the fast lane: requests of few rows that are like an earlier one, not parsed and not queued
admission        checks headers; limits memory and connections, and keeps each tenant's role
quota            limits each tenant's requests, rows and work per second
usage            counts what each tenant has used
credentials      tenants' and helpers' certificates, and the revocation list
"""
