/* Structures of a ring in shared memory, and of each end in its process's own memory. See _ring.c. */
#ifndef RING_H
#define RING_H

#include <stdatomic.h>
#include <stdint.h>

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics would take locks of one process");

/* Two cache lines: processors fetch them in pairs. */
#define APART _Alignas(128)

/* Results of a wait; the same numbers as in signals.py. ANNOUNCED is internal to waits. */
enum { READY = 0, PENDING = 1, ENDED = 2, ALONE = 3, ANNOUNCED = 4 };

enum { SHARES = 1024 }; /* unit of shares of time: SHARES of SHARES is all */

typedef struct {
    APART _Atomic uint64_t flags; /* one bit per process: sleeps, or is about to */
    _Atomic uint32_t bell;        /* the futex word they sleep on */
} doze_t;

typedef struct {
    APART _Atomic uint64_t received;
    _Atomic uint32_t gone;
} reader_t;

typedef struct {
    APART _Atomic uint64_t published;
    _Atomic int64_t stamp;        /* when the last message was published, ns */
    _Atomic int64_t announced;    /* when the next message was last announced, ns; 0: not announced */
    doze_t readers_doze;          /* until there is a message */
    doze_t writer_dozes;          /* until there is room */
    APART _Atomic uint32_t ended; /* this line changes once or twice in a ring's life */
    _Atomic uint32_t live;        /* readers that were not dropped */
    uint32_t readers, slots;
    reader_t reader[];
} ring_t;

/* Budget of spinning: a share of the time that passes. */
typedef struct {
    int64_t share; /* in SHARES */
    int64_t most;  /* ns: maximum of `saved` */
    int64_t saved; /* ns of spinning that the budget covers */
    int64_t at;    /* when `saved` was computed */
} budget_t;

/* One end, in the memory of its process. */
typedef struct {
    uint64_t sequence; /* messages sent or received through it */
    uint64_t room;     /* the writer's: number of the first message that must wait for a reader, as of the last look */
    int64_t spin;      /* ns to spin for in the next wait */
    int64_t spin_most;
    int64_t announce; /* ns after an announcement during which a reader may spin; 0: announcements are ignored */
    int64_t heeded;   /* the reader's: the last announcement that it has spun for, or ignored, without a message */
    budget_t budget;  /* the reader's, for spinning after announcements */
    uint32_t index;   /* the reader's */
} end_t;

/* The slots of a ring, as the segment lays them out (segment.py). */
typedef struct {
    unsigned char *memory; /* of the first */
    uint64_t stride;       /* from one to the next */
    uint64_t bytes;        /* of a message in one */
} slots_t;

/* Header of a slot; the message follows, unless it is at `offset`. */
typedef struct {
    uint64_t bytes, offset;
} header_t;

#endif
