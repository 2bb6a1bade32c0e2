"""Celery names: what Celery 5 calls its settings, options, methods and commands, as of its own reference.

Each of them has its line on the guide's page "From Celery", in the section that it stands under here. `redis_*` on the
page stands for all settings that begin so.
"""

from collections.abc import Mapping

DECLARING = """
    name bind base typing max_retries default_retry_delay rate_limit ignore_result trail send_events
    store_errors_even_if_ignored serializer compression time_limit soft_time_limit backend track_started acks_late
    acks_on_failure acks_on_timeout acks_on_failure_or_timeout reject_on_worker_lost retry_on_worker_lost throws expires
    priority resultrepr_maxsize autoretry_for dont_autoretry_for retry_kwargs retry_backoff
    retry_backoff_max retry_jitter pydantic pydantic_strict pydantic_context pydantic_dump_kwargs shadow_name queue
    exchange routing_key delivery_mode
    Request Strategy shared lazy filter shared_task include autodiscover_tasks conf config_from_object register_task
    finalize gen_task_name set_default set_current current_app steps user_options connection pool amqp events loader
"""
SENDING = """
    delay apply_async args kwargs countdown eta expires shadow connection producer publisher retry retry_policy task_id
    time_limit soft_time_limit queue exchange routing_key delivery_mode priority serializer compression link link_error
    add_to_parent ignore_result headers reply_to correlation_id group_id group_index root_id parent_id
    s si signature subtask maybe_signature apply clone replace freeze set_immutable on_error stamp delay_on_commit
    group skew chain chord map starmap chunks send_task
"""
RESULTS = """
    get timeout propagate interval no_ack follow_parents callback on_message on_interval disable_sync_subtasks
    allow_join_result then collect get_leaf iterdeps exists ready successful failed maybe_throw build_graph graph
    children parent result info traceback state status name args kwargs worker date_done retries queue task_id forget
    revoke revoke_by_stamped_headers AsyncResult ResultSet GroupResult completed_count waiting join join_native
    iter_native save restore as_tuple as_list PENDING RECEIVED STARTED RETRY SUCCESS REVOKED REJECTED FAILURE IGNORED
"""
INSIDE = """
    retry replace add_to_chord send_event add_trail push_request hostname delivery_info called_directly eta expires
    timelimit headers group root_id parent_id origin is_eager Reject Ignore SoftTimeLimitExceeded is_aborted
    MaxRetriesExceededError WorkerLostError get_task_logger update_state
"""
ERRORS = """
    CeleryError ImproperlyConfigured NotRegistered AlreadyRegistered TimeoutError TaskRevokedError Retry Reject Ignore
    OperationalError EncodeError ContentDisallowed BackendError QueueNotFound ChordError SecurityError IncompleteStream
    InvalidTaskError
"""
SETTINGS = """
    accept_content result_accept_content enable_utc imports include timezone beat_enable_remote_control
    beat_remote_control_max_tick_age beat_max_loop_interval beat_schedule beat_scheduler beat_schedule_filename
    beat_sync_every beat_cron_starting_deadline broker_url broker_read_url broker_write_url broker_transport
    broker_transport_options broker_connection_timeout broker_connection_retry broker_connection_retry_on_startup
    broker_connection_max_retries broker_channel_error_retry broker_failover_strategy broker_heartbeat
    broker_heartbeat_checkrate broker_login_method broker_native_delayed_delivery_queue_type broker_pool_limit
    broker_pool_acquire_timeout broker_use_ssl broker_host broker_port broker_user broker_password broker_vhost
    cache_backend cache_backend_options cassandra_servers s3_bucket azureblockblob_container_name gcs_bucket
    control_queue_ttl control_queue_expires control_queue_exclusive control_queue_durable control_exchange
    couchbase_backend_settings arangodb_backend_settings mongodb_backend_settings cosmosdbsql_database_name
    event_queue_expires event_queue_ttl event_queue_prefix event_queue_exclusive event_queue_durable event_serializer
    event_exchange redis_backend_use_ssl redis_db redis_host redis_max_connections redis_username redis_password
    redis_port redis_socket_timeout redis_socket_connect_timeout redis_retry_on_timeout redis_socket_keepalive
    result_backend result_cache_max result_compression result_exchange result_exchange_type result_expires
    result_chord_expires result_failure_expires result_persistent result_extended result_serializer
    result_backend_transport_options result_chord_retry_interval result_chord_join_timeout
    result_backend_max_sleep_between_retries_ms result_backend_max_retries
    result_backend_base_sleep_between_retries_ms result_backend_always_retry elasticsearch_timeout security_certificate
    security_cert_store security_key security_key_password security_digest database_url database_engine_options
    task_acks_late task_acks_on_failure_or_timeout task_acks_on_failure task_acks_on_timeout task_always_eager
    task_annotations task_compression task_create_missing_queues task_create_missing_queue_type
    task_create_missing_queue_exchange_type task_inherit_parent_priority task_default_delivery_mode task_default_queue
    task_default_queue_type task_default_exchange task_default_exchange_type task_default_routing_key
    task_default_rate_limit task_default_priority task_eager_propagates task_ignore_result task_store_eager_result
    task_protocol task_publish_retry task_publish_retry_policy task_queues task_queue_max_priority
    task_reject_on_worker_lost task_retry_on_worker_lost task_remote_tracebacks task_repr_maxlevels task_routes
    task_send_sent_event task_serializer task_soft_time_limit task_time_limit task_store_errors_even_if_ignored
    task_track_started task_allow_error_cb_on_chord_header worker_agent worker_autoscaler
    worker_cancel_long_running_tasks_on_connection_loss worker_soft_shutdown_timeout
    worker_enable_soft_shutdown_on_idle worker_concurrency worker_consumer worker_direct worker_disable_rate_limits
    worker_deduplicate_successful_tasks worker_enable_remote_control worker_hijack_root_logger worker_log_color
    worker_log_datefmt worker_log_format worker_lost_wait worker_max_memory_per_child worker_max_tasks_per_child
    worker_pool worker_pool_putlocks worker_pool_restarts worker_pool_start_method worker_proc_alive_timeout
    worker_prefetch_multiplier worker_eta_task_limit worker_enable_prefetch_count_reduction worker_disable_prefetch
    worker_redirect_stdouts worker_redirect_stdouts_level worker_send_task_events worker_state_db
    worker_task_log_datefmt worker_task_log_format worker_timer worker_timer_precision worker_detect_quorum_queues
    setup_security add_periodic_task
"""
COMMANDS = """
    worker multi beat call purge result status events inspect control shell migrate graph upgrade logtool amqp report
    list ping active reserved scheduled stats active_queues query_task revoked registered conf clock memsample memdump
    objgraph revoke terminate revoke_by_stamped_headers rate_limit time_limit add_consumer cancel_consumer pool_grow
    pool_shrink pool_restart autoscale shutdown enable_events disable_events heartbeat election worker_main
    --hostname --detach --statedb --optimization --prefetch-multiplier --disable-prefetch --pool --task-events
    --time-limit --soft-time-limit --max-tasks-per-child --pool-start-method --max-memory-per-child --purge
    --exclude-queues --include --without-gossip --without-mingle --without-heartbeat --heartbeat-interval --autoscale
    --beat --scheduler --logfile --pidfile --uid --gid --umask --executable --workdir
"""
SIGNALS = """
    task_prerun task_postrun task_success task_failure task_retry task_received task_revoked task_rejected
    task_unknown task_internal_error before_start on_success on_failure on_retry after_return on_replace
    before_task_publish after_task_publish
    worker_init worker_process_init worker_process_shutdown worker_ready worker_shutting_down worker_shutdown
    celeryd_init celeryd_after_setup worker_before_create_process heartbeat_sent beat_init beat_embedded_init
    setup_logging after_setup_logger after_setup_task_logger import_modules user_preload_options
    eventlet_pool_started eventlet_pool_preshutdown eventlet_pool_postshutdown eventlet_pool_apply
"""
BY_SECTION: Mapping[str, list[str]] = {
    "Declaring": DECLARING.split(),
    "Sending": SENDING.split(),
    "Results": RESULTS.split(),
    "Inside a task": INSIDE.split(),
    "Errors": ERRORS.split(),
    "Signals": SIGNALS.split(),
    "Settings": SETTINGS.split(),
    "Command line": COMMANDS.split(),
}
