// Which host this is.
#pragma once

#include "transport/csrc/wire.h"

namespace hymcache {

// The kernel's boot id: processes that have it in common can share memory, in whatever containers
// they are. Zeros where it cannot be read.
wire::HostId this_host();

}  // namespace hymcache
