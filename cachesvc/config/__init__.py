"""Settings: every value that a user may choose, its meaning, and where the one in force came from.

Flags win over the environment, the environment over the file, the file over the defaults. The only
package that reads the environment. `places`, `quantities` and `errors` import nothing heavy, since
every command needs them.

    sources -> settings -> sections -> places, quantities, errors
"""
