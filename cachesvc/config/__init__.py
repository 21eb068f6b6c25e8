"""Settings: every value that a user can choose, its meaning and its origin.

Flags override the environment, which overrides the file, which overrides the defaults. Only this
package reads the environment. `places`, `quantities` and `errors` import nothing heavy, because
every command needs them.

    sources -> settings -> sections -> places, quantities, errors
"""
