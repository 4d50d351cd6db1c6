"""What a tenant and a key may use, held exactly across all gateways, and one usage row for each request.

Reading order: `charges` (which limits a request counts against, and how much), `refusal` (429 and the x-ratelimit headers), `account` (one
admitted request, and what it used), `ledger` (admission and settlement), `upkeep` (leases renewed, those of dead gateways settled), `state`
(how much is used now), `caller_view` (models and bounds as a caller may see them).
"""
