"""`/api/v1/...`: the methods of `kvtier.Client` over HTTP, each in a thread, with the daemon's own checks behind it.

`daemon_calls` calls and answers, `json_schemas` describes the answers, `request_bodies` what is sent; the routes are in
`daemon_routes`, `prompt_routes`, `pin_routes`, `bundle_routes`, `request_routes` and `live_routes`.
"""
