"""Open leases, reservations, promotions and operations of tiers. Each ends once (law 2)."""
