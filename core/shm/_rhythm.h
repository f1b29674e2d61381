/* When a reader of a ring should be awake, from when messages came before. No clock and no shared memory: what it knows
 * is told, and what it answers follows from that. Times are CLOCK_MONOTONIC in ns.
 *
 * A processor that sleeps takes long to wake, in a virtual machine up to some hundred microseconds, so only a reader that
 * is awake when the message comes has it at once. Steps come at regular intervals. Of the last KEPT intervals, and of how
 * late the last KEPT timers woke this thread, order statistics are taken, which one outlier does not move:
 *
 *     last message                       wake         from                                  to
 *          |------------- sleeps ----------|.. wakes ..|-- spins, until the message comes ----|-- sleeps for good --
 *                                                      | <---- a share of the interval -----> |
 *
 * The window from .. to begins just before the earliest interval it is to catch, since each moment before the message is
 * paid for every time; what the share leaves goes behind the latest, where only late messages make it cost anything. If no
 * window of that width holds half of the intervals, there is none: bursts, pauses and random arrivals cost nothing.
 * A message has one window. In an idle ring nobody spins after the first.
 */
#include <stdint.h>

enum {
    KEPT = 16,            /* samples */
    SHARES = 1024,        /* in one */
    WINDOW_MOST = 500000, /* ns: a slow ring is not worth more */
};

typedef struct {
    int64_t ns[KEPT];
    uint32_t count; /* that there were ever */
} samples_t;

typedef struct {
    samples_t intervals; /* between two messages */
    samples_t lateness;  /* of sleeps: from the moment asked for to the moment awake */
    uint64_t heard;      /* messages published, as last looked up */
    int64_t stamp;       /* when the last one of them was */
    int64_t spun;        /* ns, for the one after it */
    int64_t share;       /* of an interval that may be spun, in SHARES; 0: no windows */
} rhythm_t;

typedef struct {
    int64_t wake; /* what to ask the timer for; past: do not sleep */
    int64_t from, to;
    int64_t left; /* ns that may be spun, from when it is awake */
} window_t;

static void keep(samples_t *samples, int64_t ns) { samples->ns[samples->count++ % KEPT] = ns < 0 ? 0 : ns; }

/* The samples there are, in order; returns how many. */
static int sorted(const samples_t *samples, int64_t *out) {
    const int count = samples->count < KEPT ? (int)samples->count : KEPT;
    for (int i = 0; i < count; i++) {
        int place = i;
        for (; place > 0 && out[place - 1] > samples->ns[i]; place--)
            out[place] = out[place - 1];
        out[place] = samples->ns[i];
    }
    return count;
}

static int64_t window_width(int64_t interval, int64_t share) {
    const int64_t width = interval / SHARES * share;
    return width < WINDOW_MOST ? width : WINDOW_MOST;
}

/* What is left free in front, as intervals may be a little shorter than those kept. */
static int64_t window_front(int64_t width) { return width / 16; }

/* `published` messages have come, the last one at `stamp`. Between two that came unheard nothing is known. A stamp may be
 * that of the message after, if this is being published: then two samples of KEPT are wrong. */
void rhythm_hear(rhythm_t *rhythm, uint64_t published, int64_t stamp) {
    if (published == rhythm->heard)
        return;
    if (published == rhythm->heard + 1 && rhythm->heard)
        keep(&rhythm->intervals, stamp - rhythm->stamp);
    rhythm->heard = published;
    rhythm->stamp = stamp;
    rhythm->spun = 0;
}

/* A sleep until `wake` of a window has ended at `now`. */
void rhythm_woke(rhythm_t *rhythm, int64_t wake, int64_t now) {
    if (now >= wake)
        keep(&rhythm->lateness, now - wake);
}

/* How much earlier to wake: the greatest lateness that costs, where the sleep is late by the median, at most `extra` of
 * spinning. */
static int64_t allowance(const rhythm_t *rhythm, int64_t extra) {
    int64_t lateness[KEPT];
    const int count = sorted(&rhythm->lateness, lateness);
    if (!count)
        return 0;
    int place = count / 2;
    while (place + 1 < count && lateness[place + 1] - lateness[count / 2] <= extra)
        place++;
    return lateness[place];
}

/* Whether the next message has a window that is not over; then it is in `window`. */
int rhythm_expect(const rhythm_t *rhythm, int64_t now, window_t *window) {
    int64_t interval[KEPT];
    if (!rhythm->share || sorted(&rhythm->intervals, interval) < KEPT)
        return 0;
    int first = 0, most = 0;
    for (int i = 0, end = 0; i < KEPT; i++) { /* the window that begins with interval i; of equals the latest is cheapest */
        const int64_t width = window_width(interval[i], rhythm->share);
        while (end < KEPT && interval[end] - interval[i] <= width - window_front(width))
            end++;
        if (end - i >= most) {
            most = end - i;
            first = i;
        }
    }
    if (most < KEPT / 2)
        return 0;
    const int64_t width = window_width(interval[first], rhythm->share);
    int64_t early = allowance(rhythm, width / 8);
    if (early > interval[first] / 2) /* so that it sleeps, and learns when sleeps are less late */
        early = interval[first] / 2;
    window->from = rhythm->stamp + interval[first] - window_front(width);
    window->to = window->from + width;
    window->wake = window->from - early;
    window->left = width - rhythm->spun;
    if (window->left <= 0 || now >= window->to)
        return 0;
    return now < window->wake || now + window->left > window->from;
}
