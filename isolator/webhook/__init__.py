"""The admission webhook: decide (rule), build the patch (patch), serve both over TLS (app, server).

The rule is pure: `rule.decide` and `patch.build_patch` take a pod as parsed JSON and touch nothing else.
"""
