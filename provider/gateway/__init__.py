"""The only code that parses what tenants send. Read in this order:

gateway          serves authenticated connections, one thread each
listener         accepts connections, makes their handshakes, and limits those that are not authenticated
frames           the frames of one connection, within limits and deadlines, and what all connections share
connection       checks the requests of a tenant's connection and sends the answers
repeated         the fast lane: requests of few rows that are like an earlier one, not parsed and not queued
admission        checks headers; limits memory and connections, and keeps each tenant's role
quota            limits each tenant's requests, rows and work per second
usage            counts what each tenant has used
credentials      tenants' authorities, the provider's certificate, and the revocation list
"""
