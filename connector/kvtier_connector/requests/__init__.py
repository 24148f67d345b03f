"""What requests ask of kvtier: parameters of clients and hints of orchestrators, read and carried out."""
